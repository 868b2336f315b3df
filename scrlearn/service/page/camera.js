// Pictures from the camera.

import { byId, alertUser, clearAlert } from "./dom.js";

const SIDE = 256;
const REASONS = {
  NotAllowedError: "The browser may not use the camera. Allow it for this page, then try again.",
  NotFoundError: "There is no camera on this device.",
  NotReadableError: "The camera is in use by another program.",
};

// Buttons and video of the camera panel; `taken(blob)` is called with each picture.
export class Camera {
  constructor(taken) {
    this.video = byId("video");
    this.stream = null;
    byId("camera-start").addEventListener("click", () => this.start());
    byId("shutter").addEventListener("click", () => this.#take().then(taken));
  }

  async start() {
    clearAlert("camera");
    if (!navigator.mediaDevices?.getUserMedia) {
      alertUser("Browsers give a page the camera only over HTTPS, or from this machine itself (http://127.0.0.1).", "camera");
      return;
    }
    try {
      const wanted = { video: { facingMode: "environment", width: { ideal: 640 }, height: { ideal: 640 } } };
      this.stream = await navigator.mediaDevices.getUserMedia(wanted);
    } catch (error) {
      alertUser(REASONS[error.name] ?? `The camera cannot be used: ${error.message}`, "camera");
      return;
    }
    this.video.srcObject = this.stream;
    await this.video.play();
    this.#show(true);
    byId("shutter").focus();
  }

  stop() {
    for (const track of this.stream?.getTracks() ?? []) track.stop();
    this.stream = null;
    this.video.srcObject = null;
    this.#show(false);
  }

  #show(on) {
    this.video.hidden = byId("shutter").hidden = !on;
    byId("camera-off").hidden = on;
  }

  // The middle square of what it sees.
  #take() {
    const { videoWidth: width, videoHeight: height } = this.video;
    const side = Math.min(width, height);
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = SIDE;
    const from = [(width - side) / 2, (height - side) / 2];
    canvas.getContext("2d").drawImage(this.video, ...from, side, side, 0, 0, SIDE, SIDE);
    return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  }
}
