"""What the service survives: crashes, damage, full disks, a second server, and a changed mind."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import shutil
import threading
from pathlib import Path

import pytest
import torch
from service_tools import CONFIG, images_of, open_service, pixels, teach, tiny

from scrlearn.errors import CheckpointError, InputError
from scrlearn.estimator import OnlineClassifier
from scrlearn.service.core import Service
from scrlearn.service.journal import Journal
from scrlearn.service.problems import Problem
from scrlearn.service.settings import Limits, ModelConfig
from scrlearn.service.state import StateError, StateFolder

NO_SNAPSHOTS = Limits(snapshot_images=10**9, snapshot_seconds=1e9)
OFTEN = Limits(snapshot_images=10, snapshot_seconds=1e9)


def crashed(service: Service, to: Path) -> Path:
    """The state as a crash at this moment would leave it: copied while no snapshot came or went."""
    for _ in range(100):
        before = sorted(os.listdir(service.folder.path))
        with contextlib.suppress(shutil.Error):  # a file that went away while it was copied
            shutil.copytree(service.folder.path, to)
            if sorted(os.listdir(service.folder.path)) == before:
                return to
        shutil.rmtree(to)
    raise AssertionError("the state never stood still")


def flip(path: Path, place: float = 0.7) -> None:
    content = bytearray(path.read_bytes())
    content[int(len(content) * place)] ^= 4
    path.write_bytes(content)


def caught_up(service: Service) -> str:
    assert service.worker.when_published(service.journal.last).result(20)
    return service.replica.digest()


# --------------------------------------------------------------------------------------------------------- going on


def test_stopped_and_started_it_is_the_same_model(tmp_path: Path) -> None:
    with open_service(tmp_path / "a", OFTEN) as service:
        teach(service, "cat", 25)
        teach(service, "dog", 7)
        expected, counts = service.replica.digest(), service.worker.counts
    with Service(tmp_path / "a", encoder=tiny()) as service:  # the configuration is the state's
        assert service.config == ModelConfig(**{**CONFIG, "encoder": "given:Sequential"})
        assert service.replica.digest() == expected
        assert service.worker.counts == counts == {"cat": 25, "dog": 7}
        assert service.worker.learned == 32
        assert [known["label"] for known in service.classes()] == ["cat", "dog"]
    assert len(list((tmp_path / "a").glob("snapshot-*.scr"))) == 2


def test_a_snapshot_is_an_ordinary_model(tmp_path: Path) -> None:
    with open_service(tmp_path) as service:
        teach(service, "cat", 10)
        teach(service, "dog", 10)
        digest = service.replica.digest()
    newest = StateFolder(tmp_path).snapshots()[0]
    clf = OnlineClassifier.load(newest.path, encoder=tiny())
    assert clf.digest() == digest
    assert clf.predict(pixels("dog", 9)[None]).tolist() == ["dog"]


def test_a_crash_before_any_snapshot(tmp_path: Path) -> None:
    with open_service(tmp_path / "a", NO_SNAPSHOTS) as service:
        for n in range(4):
            teach(service, "cat", 3 + n, start=10 * n)
            teach(service, "dog", 12, start=20 * n)
        copy = crashed(service, tmp_path / "b")
        expected = service.replica.digest()
    assert not list(copy.glob("snapshot-*"))
    with open_service(copy) as service:
        assert caught_up(service) == expected
        assert service.worker.images == service.journal.last


def test_a_stop_with_images_still_to_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was acknowledged is learned after the next start."""
    service = open_service(tmp_path)
    teach(service, "cat", 5)
    stopping = threading.Event()
    monkeypatch.setattr(service.worker, "_turn", lambda: stopping.wait(20) and False)
    service.worker.wake()
    service.learn(images_of("dog", 15), ["dog"] * 15).result(10)
    closing = threading.Thread(target=service.close)
    closing.start()
    while not service.worker._stopping:
        closing.join(0.01)
    stopping.set()
    closing.join()
    with open_service(tmp_path) as service:
        caught_up(service)
        assert service.worker.counts == {"cat": 5, "dog": 15}


def test_recovery_says_that_it_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_service(tmp_path / "a", NO_SNAPSHOTS) as service:
        teach(service, "cat", 30)
        copy = crashed(service, tmp_path / "b")
    go_on = threading.Event()
    next_batch = Journal.next_batch
    monkeypatch.setattr(Journal, "next_batch", lambda *arguments: go_on.wait(20) and next_batch(*arguments))
    with open_service(copy) as service:
        assert service.status == "recovering"
        assert service.state()["pending"] == 30
        assert service.ask(images_of("cat", 1)).result(20).answers[0].label is None, "it answers all the same"
        go_on.set()
        caught_up(service)
        assert service.status == "ok"


# ------------------------------------------------------------------------------------------------------------- damage


def history(folder: Path) -> tuple[Path, str]:
    """A state with two snapshots and a journal that goes on, as a crash leaves it; and the model it must come to."""
    with open_service(folder / "a", OFTEN) as service:
        for n in range(5):
            teach(service, "cat", 6, start=100 * n)
            teach(service, "dog", 6, start=100 * n)
        copy = crashed(service, folder / "b")
        return copy, service.replica.digest()


def test_a_damaged_snapshot_is_passed_over_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copy, expected = history(tmp_path)
    newest, older = sorted(copy.glob("snapshot-*.scr"), reverse=True)
    flip(newest)
    with open_service(copy) as service:
        assert caught_up(service) == expected, "the journal reaches back to the older one"
        assert any(newest.name in note and "damaged" in note for note in service.state()["notes"])
        assert newest.name in caplog.text
        assert service.worker.lost == 0
    assert older.exists()
    left = StateFolder(copy)
    assert len(left.load(lambda path: path).snapshots) == 2, "both that are there now are good"
    left.close()


@pytest.mark.parametrize("damage", ["note", "note-gone", "truncated", "empty", "model-gone"])
def test_other_damage_to_the_newest_snapshot(tmp_path: Path, damage: str) -> None:
    copy, expected = history(tmp_path)
    newest = max(copy.glob("snapshot-*.scr"))
    note = newest.with_suffix(".json")
    if damage == "note":
        note.write_text("{")
    elif damage == "note-gone":
        note.unlink()
    elif damage == "truncated":
        newest.write_bytes(newest.read_bytes()[:-10])
    elif damage == "empty":
        newest.write_bytes(b"")
    else:
        newest.unlink()
    with open_service(copy) as service:
        assert caught_up(service) == expected
        teach(service, "owl", 30)
    with open_service(copy) as service:
        assert service.notes == [], "it was cleared away"


def test_no_good_snapshot_is_an_error_that_changes_nothing(tmp_path: Path) -> None:
    copy, _ = history(tmp_path)
    for path in copy.glob("snapshot-*.scr"):
        flip(path)
    before = {path.name: path.read_bytes() for path in copy.glob("snapshot-*")}
    with pytest.raises(StateError, match=r"no good snapshot .* the journal begins only after entry \d+"):
        open_service(copy)
    assert before == {path.name: path.read_bytes() for path in copy.glob("snapshot-*")}


@pytest.mark.parametrize("gone", ["snapshot-*", "snapshot-*.json"])
def test_missing_snapshots_are_no_reason_to_begin_anew(tmp_path: Path, gone: str) -> None:
    copy, _ = history(tmp_path)
    for path in copy.glob(gone):
        path.unlink()
    with pytest.raises(StateError, match=r"no good snapshot .* the journal begins only after entry \d+"):
        open_service(copy)


def test_a_damaged_only_snapshot_is_made_good_by_the_journal(tmp_path: Path) -> None:
    with open_service(tmp_path / "a", OFTEN) as service:
        teach(service, "cat", 11)
        copy = crashed(service, tmp_path / "b")
        expected = service.replica.digest()
    [only] = copy.glob("snapshot-*.scr")
    flip(only)
    with open_service(copy) as service:
        assert caught_up(service) == expected


def test_a_damaged_journal_entry_is_counted(tmp_path: Path) -> None:
    with open_service(tmp_path / "a", NO_SNAPSHOTS) as service:
        teach(service, "cat", 10)
        service.journal._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        copy = crashed(service, tmp_path / "b")
    path = copy / "journal.sqlite3"
    content = bytearray(path.read_bytes())
    content[content.index(pixels("cat", 4).tobytes()) + 3] ^= 1
    path.write_bytes(content)
    with open_service(copy) as service:
        caught_up(service)
        assert (service.worker.lost, service.worker.images) == (1, 9)


def test_a_ruined_journal_is_named_and_the_snapshot_goes_on(tmp_path: Path) -> None:
    with open_service(tmp_path) as service:
        teach(service, "cat", 10)
    (tmp_path / "journal.sqlite3").write_bytes(b"no database" * 1000)
    with open_service(tmp_path) as service:
        assert any("journal was damaged" in note for note in service.notes)
        assert teach(service, "dog", 1) == 11


def test_a_lost_journal_does_not_reuse_places(tmp_path: Path) -> None:
    with open_service(tmp_path) as service:
        teach(service, "cat", 10)
    for path in tmp_path.glob("journal*"):
        path.unlink()
    with open_service(tmp_path) as service:
        assert teach(service, "dog", 1) == 11


# ---------------------------------------------------------------------------------------------------------- full disk


def test_a_full_disk_refuses_and_goes_on_answering(tmp_path: Path) -> None:
    with open_service(tmp_path, NO_SNAPSHOTS) as service:
        teach(service, "cat", 10)
        db = service.journal._db
        db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
        futures = [service.learn(images_of("dog", 64, 64 * n), ["dog"] * 64, f"k{n}") for n in range(20)]
        errors = [future.exception(20) for future in futures]  # of all: later ones may still be accepted
        n = next(number for number, error in enumerate(errors) if error is not None)
        with pytest.raises(Problem, match="disk is full") as caught:
            futures[n].result()
        assert (caught.value.status, caught.value.code) == (507, "disk-full")
        assert service.ask(images_of("cat", 1)).result(10).answers[0].label == "cat"
        accepted = service.journal.last
        db.execute("PRAGMA max_page_count = 1000000")
        receipt = service.learn(images_of("dog", 64, 64 * n), ["dog"] * 64, f"k{n}").result(10)
        assert (receipt.first, receipt.repeated) == (accepted + 1, False), "what was refused was not kept"
        caught_up(service)
        assert service.worker.images == service.journal.last


def test_other_trouble_with_the_journal_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_service(tmp_path) as service:
        with monkeypatch.context() as patch:
            patch.setattr(service.journal, "append", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
            with pytest.raises(Problem) as caught:
                service.learn(images_of("cat", 1), ["cat"]).result(10)
            assert (caught.value.status, caught.value.code) == (503, "not-written")
            patch.setattr(service.journal, "append", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
            with pytest.raises(Problem) as caught:
                service.learn(images_of("cat", 1), ["cat"]).result(10)
            assert caught.value.status == 507
        assert teach(service, "cat", 1) == 1


def test_snapshots_fail_on_a_full_disk_and_learning_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scrlearn.service.worker.RETRY_SECONDS", 0.01)

    def full(path, data):
        raise OSError(errno.ENOSPC, "no space left", str(path))

    with open_service(tmp_path / "a", Limits(snapshot_images=5, snapshot_seconds=1e9)) as service:
        with monkeypatch.context() as patch:
            patch.setattr("scrlearn.checkpoint.atomic_write", full)
            for n in range(4):
                teach(service, "cat", 10, start=10 * n)
            assert any("No snapshot can be written" in problem for problem in service.state()["problems"])
            assert len(service.journal) == 40, "nothing is cut that no snapshot holds"
            copy, expected = crashed(service, tmp_path / "b"), service.replica.digest()
        teach(service, "cat", 10, start=100)
        assert service.worker.when_published(50).result(10)
    with open_service(copy) as service:
        assert caught_up(service) == expected


def test_without_snapshots_the_journal_has_a_bound(tmp_path: Path) -> None:
    with open_service(tmp_path, Limits(snapshot_images=10**9, snapshot_seconds=1e9, journal_images=30)) as service:
        teach(service, "cat", 25)
        with pytest.raises(Problem, match="journal is full"):
            service.learn(images_of("cat", 10), ["cat"] * 10)
        assert service.ask(images_of("cat", 1)).result(10).answers


def test_a_reserve_is_kept_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_service(tmp_path, Limits(reserve_bytes=1000)) as service:
        monkeypatch.setattr(service.folder, "free_bytes", lambda: 999)
        with pytest.raises(Problem, match="almost full") as caught:
            service.learn(images_of("cat", 1), ["cat"])
        assert caught.value.status == 507
        monkeypatch.setattr(service.folder, "free_bytes", lambda: 1000)
        teach(service, "cat", 1)


def test_the_learner_waits_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a batch must be on disk before the batch is learned."""
    monkeypatch.setattr("scrlearn.service.worker.RETRY_SECONDS", 0.01)
    with open_service(tmp_path) as service:
        failed = threading.Event()

        def full(*_):
            failed.set()
            raise OSError(errno.ENOSPC, "no space left")

        with monkeypatch.context() as patch:
            patch.setattr(service.journal, "next_batch", full)
            service.learn(images_of("cat", 3), ["cat"] * 3).result(10)
            assert failed.wait(10)
            failed.clear()
            assert failed.wait(10), "it tries again"
            assert any("learning waits" in problem for problem in service.state()["problems"])
        caught_up(service)
        assert service.worker.images == 3
        assert service.state()["problems"] == []


def test_disk_use_is_bounded(tmp_path: Path) -> None:
    with open_service(tmp_path, Limits(snapshot_images=20, snapshot_seconds=1e9)) as service:
        sizes = []
        for n in range(30):
            teach(service, "cat", 20, start=20 * n)
            teach(service, "dog", 5, start=20 * n)
            sizes.append(service.folder.used_bytes())
        assert max(sizes[10:]) < 1.3 * max(sizes[3:10])
        assert len(service.journal) <= 60


# --------------------------------------------------------------------------------------------------------- forgetting


def on_disk(folder: Path, *needles: bytes) -> list[str]:
    return [path.name for path in folder.iterdir() if any(needle in path.read_bytes() for needle in needles)]


def test_a_forgotten_class_is_gone_from_the_disk(tmp_path: Path) -> None:
    secrets = [pixels("secret", n).tobytes() for n in range(8)]
    with open_service(tmp_path / "a", OFTEN) as service:
        teach(service, "cat", 12)
        teach(service, "secret", 8)
        teach(service, "cat", 12, start=50)
        assert on_disk(service.folder.path, *secrets)
        receipt = service.forget("secret").result(10)
        assert service.worker.when_erased(receipt.last).result(10)
        assert on_disk(service.folder.path, *secrets, b"secret") == []
        assert service.worker.counts == {"cat": 24}
        expected = service.replica.digest()
        copy = crashed(service, tmp_path / "b")
    with open_service(copy) as service:
        assert caught_up(service) == expected
        assert service.replica.labels == ["cat"]
    names = sorted(path.name for path in copy.glob("snapshot-*.scr"))
    assert [name[-6:] for name in names] == ["-a.scr", "-b.scr"], "there is still something to fall back to"
    flip(copy / names[1])
    with open_service(copy) as service:
        assert caught_up(service) == expected
        assert len(service.notes) == 1


@pytest.mark.parametrize("crash_in", ["save", "keep", "cut"])
def test_a_crash_while_forgetting_is_made_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_in: str) -> None:
    """Wherever the crash comes, the class is gone after the next start, and the model is the one it would have been."""
    secrets = [pixels("secret", n).tobytes() for n in range(8)]
    copy = tmp_path / "b"
    with open_service(tmp_path / "a", OFTEN) as service:
        teach(service, "cat", 12)
        teach(service, "secret", 8)
        owner = {"save": service.folder, "keep": service.folder, "cut": service.journal}[crash_in]
        original = getattr(owner, crash_in)

        def copy_first(*arguments):
            if not copy.exists() and service.worker._must_erase:
                crashed(service, copy)
            return original(*arguments)

        monkeypatch.setattr(owner, crash_in, copy_first)
        receipt = service.forget("secret").result(10)
        assert service.worker.when_erased(receipt.last).result(10)
        expected = service.replica.digest()
    assert on_disk(copy, *secrets)
    with open_service(copy) as service:
        assert caught_up(service) == expected
        assert service.worker.when_erased(receipt.last).result(10)
        service.worker.stop()
        assert on_disk(copy, *secrets) == []


def test_forgetting_while_its_images_wait(tmp_path: Path) -> None:
    with open_service(tmp_path) as service:
        futures = [service.learn(images_of("cat", 20), ["cat"] * 20), service.learn(images_of("owl", 20), ["owl"] * 20)]
        futures.append(service.forget("owl"))
        futures.append(service.learn(images_of("dog", 20), ["dog"] * 20))
        last = max(future.result(10).last for future in futures)
        assert service.worker.when_published(last).result(10)
        assert service.replica.labels == ["cat", "dog"]


def test_forgetting_everything_and_beginning_again(tmp_path: Path) -> None:
    with open_service(tmp_path) as service:
        teach(service, "cat", 5)
        last = service.forget("cat").result(10).last
        assert service.worker.when_erased(last).result(10)
        assert service.ask(images_of("cat", 1)).result(10).answers[0].label is None
        assert service.map()[1].slots == []
    with open_service(tmp_path) as service:
        teach(service, "dog", 5)
        assert service.ask(images_of("dog", 1)).result(10).answers[0].label == "dog"


# ---------------------------------------------------------------------------------------------------------- the start


def test_a_second_server_is_refused(tmp_path: Path) -> None:
    with open_service(tmp_path) as service:
        with pytest.raises(StateError, match=f"Another server .process {os.getpid()}. is running"):
            open_service(tmp_path)
        teach(service, "cat", 1)
    with open_service(tmp_path):
        pass


def test_a_failed_start_lets_go_of_the_state(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no method"):
        open_service(tmp_path, method="nothing")
    assert not (tmp_path / "config.json").exists()
    with open_service(tmp_path):
        pass


def test_a_state_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot be written"):
        open_service(tmp_path / "file" / "state")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_state_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StateError, match="Permission denied"):
        open_service(tmp_path / "state")
    tmp_path.chmod(0o700)


def test_a_disk_that_cannot_be_written_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(path, data):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr("scrlearn.service.state.atomic_write", read_only)
    with pytest.raises(StateError, match="Read-only"):
        open_service(tmp_path)


def test_other_settings_than_the_states_are_refused(tmp_path: Path) -> None:
    with open_service(tmp_path):
        pass
    with pytest.raises(InputError, match=r"made with memory_size=40, and memory_size=50 was asked for"):
        open_service(tmp_path, memory_size=50)
    with pytest.raises(InputError, match=r"encoder.*give it again"):
        Service(tmp_path)
    with open_service(tmp_path, device="auto", precision="auto", threads=0) as service:
        assert service.config.precision == "fp32", "what was left to choose stays as it was chosen"
    with pytest.raises(InputError, match="no setting memory_sise"):
        Service(tmp_path / "new", {"memory_sise": 3})


def test_names_in_a_state_are_not_imported(tmp_path: Path) -> None:
    with open_service(tmp_path):
        pass
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "encoder": "os:getpid"}))
    with pytest.raises(InputError, match="give it again"):
        Service(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 1, "method": "er", "new": 1}', '{"format": 99}', "\x00"]
)
def test_a_damaged_configuration(tmp_path: Path, content: str) -> None:
    with open_service(tmp_path):
        pass
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json|newer"):
        open_service(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(StateError, match=r"no config\.json"):
        open_service(tmp_path)


def test_a_method_that_learns_at_the_end_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="offline"):
        open_service(tmp_path, method="offline")


# -------------------------------------------------------------------------------------------------------- the learner


def test_an_error_in_learning_stops_learning_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_service(tmp_path) as service:
        teach(service, "cat", 5)
        monkeypatch.setattr(service.worker._model, "learn", lambda *_: 1 / 0)
        receipt = service.learn(images_of("dog", 5), ["dog"] * 5).result(10)
        assert service.worker.when_published(receipt.last).result(10) is False
        assert service.status == "failed"
        assert service.ask(images_of("cat", 1)).result(10).answers[0].label == "cat"
        with pytest.raises(Problem, match="Learning has stopped"):
            service.learn(images_of("dog", 1), ["dog"])
    with open_service(tmp_path) as service:
        caught_up(service)
        assert service.worker.counts == {"cat": 5, "dog": 5}, "what was acknowledged is learned after the next start"


def test_a_model_that_diverges_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_service(tmp_path) as service:
        teach(service, "cat", 5)
        with torch.no_grad():
            for weight in service.worker._model.learner_.network.parameters():
                weight.fill_(torch.nan)
        with pytest.warns(UserWarning, match="loss is no longer"):
            teach(service, "cat", 5, start=10)
        assert any("diverged" in problem for problem in service.state()["problems"])
        [answer] = service.ask(images_of("cat", 1)).result(10).answers
        assert answer.label == "cat"
        assert answer.confidence == 1.0
        waited: queue.Queue = queue.Queue()
        changed = service.worker._changed
        wait = changed.wait
        monkeypatch.setattr(changed, "wait", lambda timeout=None: (waited.put(timeout), wait(timeout)))
        service.worker.wake()
        assert waited.get(timeout=10) > 1, "it waits, and does not go round and round"


def test_a_copy_shares_nothing_with_the_learner(tmp_path: Path) -> None:
    with open_service(tmp_path) as service:
        teach(service, "cat", 20)
        copy = service.replica
        before = copy.digest(), copy.images.clone(), copy.features.clone()
        teach(service, "dog", 20)
        assert copy is not service.replica
        assert copy.digest() == before[0]
        assert torch.equal(copy.images, before[1])
        assert torch.equal(copy.features, before[2])


@pytest.mark.parametrize("method", ["scr", "er", "mir", "gss", "aser", "fine-tune", "a-gem", "icarl", "lwf", "ewc++"])
def test_every_method_recovers(tmp_path: Path, method: str) -> None:
    config = {"method": method, "classifier": None, "memory_size": 20}
    with open_service(tmp_path / "a", Limits(snapshot_images=15, snapshot_seconds=1e9), **config) as service:
        for n in range(3):
            teach(service, "cat", 7, start=20 * n)
            teach(service, "dog", 7, start=20 * n)
        assert service.worker.snapshots
        copy, expected = crashed(service, tmp_path / "b"), service.replica.digest()
        assert service.ask(images_of("cat", 2)).result(10).answers
    with open_service(copy, **config) as service:
        assert caught_up(service) == expected
