// 3x3 convolutions of few channels (stride 1, padding 1): forward, the gradient of the input, and of the weights.
//
// A tile, some rows of an image (or some small images), is taken into shared memory once, with a border of one pixel. A
// row of the product's left side is then a pixel and its neighbours, in chunks of eight channels, read by ldmatrix from
// where they lie: nothing is copied nine times. A block goes from tile to tile, and the next one is on its way while
// one is worked on. Images are bfloat16 with channels last; weights are float32 as (output channel, tap, input channel).
// INNER and OUTER are multiples of 8. All sums have a fixed order.

#include "tensor_cores.cuh"

struct Tile {  // where pixels lie
    int images, height, width;  // of the whole batch
    int rows, together;         // a tile: so many rows of so many images
    u32 strips;                 // tiles one below the other in an image

    __device__ __forceinline__ int first_image(u32 tile) const { return tile / strips * together; }
    __device__ __forceinline__ int first_row(u32 tile) const { return tile % strips * rows; }
    __device__ __forceinline__ int pixels() const { return together * rows * width; }
    __device__ __forceinline__ int lines() const { return together * (rows + 2); }  // with the border
    // the place, in a tile with its border, of the upper left neighbour of pixel p
    __device__ __forceinline__ int place(int p) const {
        int row = p / width, image = row / rows;
        return (row + 2 * image) * (width + 2) + p - row * width;
    }
};

// the columns left and right of a tile's images, which stay zero
template <int CHANNELS>
__device__ __forceinline__ void clear_sides(unsigned char* to, const Tile& t) {
    constexpr int CHUNKS = CHANNELS / 8;
    for (int i = threadIdx.x; i < t.lines() * 2 * CHUNKS; i += blockDim.x) {
        int line = i / (2 * CHUNKS), chunk = i - line * (2 * CHUNKS);
        chunk += line * (t.width + 2) * CHUNKS + (chunk < CHUNKS ? 0 : t.width * CHUNKS);
        reinterpret_cast<uint4*>(to)[chunk] = uint4{0, 0, 0, 0};
    }
}

// a tile with the lines above and below, a line by a warp; lines outside the images are zeros
template <int CHANNELS>
__device__ __forceinline__ void fetch_lines(u32 to, const u16* x, const Tile& t, int tile) {
    const int image = t.first_image(tile), row = t.first_row(tile) - 1, chunks = t.width * (CHANNELS / 8);
    const u32 high = t.rows + 2;
    for (int line = threadIdx.x / 32; line < t.lines(); line += blockDim.x / 32) {
        int n = line / high, r = row + line % high;
        n += image;
        const bool inside = n < t.images && r >= 0 && r < t.height;
        const u16* from = x + (inside ? (long long)(n * t.height + r) * t.width * CHANNELS : 0);
        const u32 at = to + (line * (t.width + 2) + 1) * (CHANNELS * 2);
#pragma unroll 4
        for (int i = threadIdx.x % 32; i < chunks; i += 32) copy16(at + i * 16, from + i * 8, inside);
    }
}

// a tile without its border, which lies in one piece; zeros behind its last pixel
template <int CHANNELS>
__device__ __forceinline__ void fetch(u32 to, const u16* x, const Tile& t, int tile, int padded) {
    constexpr int CHUNKS = CHANNELS / 8;
    const int image = t.first_image(tile), row = t.first_row(tile);
    const int lines = t.strips == 1 ? min(t.together, t.images - image) * t.height : min(t.rows, t.height - row);
    const u16* from = x + (long long)(image * t.height + row) * t.width * CHANNELS;
#pragma unroll 4
    for (int i = threadIdx.x; i < padded * CHUNKS; i += blockDim.x) {
        const bool inside = i < lines * t.width * CHUNKS;
        copy16(to + i * 16, from + (inside ? i * 8 : 0), inside);
    }
}

// Weights as bfloat16, for each row of taps and output channel a line of them. TURNED: they are given as (INNER, tap,
// OUTER), and the taps are turned around. Many are asked for before the first is waited for:
// no branch may come between, so the last ones are written more than once.
template <int INNER, int OUTER, bool TURNED, int LENGTH>
__device__ __forceinline__ void take_weights(u16* to, const float* __restrict__ w) {
    constexpr int SPAN = 3 * INNER, EACH = OUTER / 4, PAIRS = OUTER * 9 * INNER / 8, AT_ONCE = INNER * OUTER > 800 ? 8 : 4;
    for (int first = threadIdx.x; first < PAIRS; first += AT_ONCE * blockDim.x) {
        float4 a[AT_ONCE], b[AT_ONCE];  // eight in a row; TURNED: four output channels of two input channels
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = min(first + j * blockDim.x, PAIRS - 1);
            const float4* from = reinterpret_cast<const float4*>(w) + (TURNED ? i + i / (9 * EACH) * (9 * EACH) : 2 * i);
            a[j] = from[0];
            b[j] = from[TURNED ? 9 * EACH : 1];
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = min(first + j * blockDim.x, PAIRS - 1);
            if (TURNED) {
                const int inner = i / (9 * EACH) * 2, tap = 8 - i / EACH % 9, outer = i % EACH * 4;
                u32* at = reinterpret_cast<u32*>(to + (tap / 3 * OUTER + outer) * LENGTH + tap % 3 * INNER + inner);
                at[0] = pair(a[j].x, b[j].x);
                at[LENGTH / 2] = pair(a[j].y, b[j].y);
                at[LENGTH] = pair(a[j].z, b[j].z);
                at[LENGTH / 2 * 3] = pair(a[j].w, b[j].w);
            } else {
                const int line = i / (SPAN / 8);
                *reinterpret_cast<uint4*>(to + (line % 3 * OUTER + line / 3) * LENGTH + i * 8 - line * SPAN) =
                    uint4{pair(a[j].x, a[j].y), pair(a[j].z, a[j].w), pair(b[j].x, b[j].y), pair(b[j].z, b[j].w)};
            }
        }
    }
    if (INNER / 8 % 2)  // half a step is left
        for (int i = threadIdx.x; i < 3 * OUTER; i += blockDim.x)
            *reinterpret_cast<uint4*>(to + i * LENGTH + SPAN) = uint4{0, 0, 0, 0};
}

// one tile's sums, of what its warps have gathered
template <int OUTER>
__device__ __forceinline__ void write_sums(float* sums, const float* gathered) {
    for (int i = threadIdx.x; i < 2 * OUTER; i += blockDim.x) {
        float whole = 0.0f;
        for (int j = 0; j < blockDim.x / 32; j++) whole += gathered[j * 2 * OUTER + i];
        sums[i] = whole;
    }
}

// y = x * w, and the sums of y's channels and of their squares: for each tile (`apart`), or for each block. BACKWARD: x is the gradient of a result,
// w the weights of the convolution that made it (as INNER, tap, OUTER), y the gradient of its input.
// A warp takes patches of 4 rows and 16 columns, where the columns of a tile's images are counted on: what is read of
// a line serves up to three rows of the result.
template <int INNER, int OUTER, bool BACKWARD, bool SUMS>
__global__ void __launch_bounds__(OUTER <= 24 ? 256 : OUTER <= 40 ? 192 : 128, 2) convolve(
    const u16* __restrict__ x, const float* __restrict__ w, u16* __restrict__ y, float* __restrict__ sums,
    int apart, int images, int height, int width, int rows, int together, int tiles) {
    constexpr int CHUNKS = 3 * INNER / 8, STEPS = (CHUNKS + 1) / 2, PARTS = OUTER / 8, ROWS = 4;
    constexpr int LENGTH = STEPS * 16 + 8;  // of a line of weights: eight more, so that reads meet all banks
    constexpr int WRITES = (16 * PARTS + 31) / 32;
    extern __shared__ __align__(16) unsigned char shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    const Tile t = {images, height, width, rows, together, static_cast<u32>((height + rows - 1) / rows)};
    const int line = (width + 2) * INNER * 2, stage = t.lines() * line;
    float* gathered = reinterpret_cast<float*>(shared + 3 * OUTER * LENGTH * 2);  // two tiles' sums, by warps
    unsigned char* own = reinterpret_cast<unsigned char*>(gathered + 2 * warps * 2 * OUTER);  // a warp's way out
    unsigned char* pixels = own + warps * 16 * OUTER * 2;
    own += warp * 16 * OUTER * 2;
    const u32 pixels_at = shared_address(pixels);

    fetch_lines<INNER>(pixels_at, x, t, blockIdx.x);
    copies_begun();
    take_weights<INNER, OUTER, BACKWARD, LENGTH>(reinterpret_cast<u16*>(shared), w);
    clear_sides<INNER>(pixels, t);
    if (gridDim.x < tiles) clear_sides<INNER>(pixels + stage, t);

    const u32 weights_at = shared_address(shared) + (lane / 16 * 8 + lane % 8) * (LENGTH * 2) + lane / 8 % 2 * 16;
    const int groups = (together * width + 15) / 16, patches = groups * ((rows + ROWS - 1) / ROWS);
    const u32 inverse = 0x7fffffffu / width + 1;
    auto image_of = [=](int column) { return static_cast<int>(__umulhi(2 * column, inverse)); };  // column / width
    int now = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, now ^= 1) {
        copies_done<0>();
        __syncthreads();  // the tile is here, and no one needs the one before
        if (tile + gridDim.x < tiles) fetch_lines<INNER>(pixels_at + (now ^ 1) * stage, x, t, tile + gridDim.x);
        copies_begun();
        if (SUMS && apart && tile != blockIdx.x)
            write_sums<OUTER>(sums + (tile - gridDim.x) * 2 * OUTER, gathered + (now ^ 1) * warps * 2 * OUTER);

        const int image = t.first_image(tile), row = t.first_row(tile);
        const int columns = min(together, images - image) * width;
        float sum[PARTS][4] = {};
        for (int patch = warp; patch < patches; patch += warps) {
            const int down = patch / groups * ROWS, right = patch % groups * 16;
            int column = right + lane % 16;
            column = column < columns ? column : 0;
            const int among = image_of(column);
            u32 from = pixels_at + now * stage + (among * (rows + 2) + down) * line;
            from += (column - among * width) * (INNER * 2) + lane / 16 * 16;
            float total[ROWS][PARTS][4] = {};
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                u32 b[(3 * PARTS + 1) / 2][4];
#pragma unroll
                for (int i = 0; i < 3 * PARTS / 2; i++) matrices4(b[i], weights_at + step * 32 + i * (16 * LENGTH * 2));
                if (PARTS % 2) matrices2(b[3 * PARTS / 2], weights_at + step * 32 + 3 * PARTS / 2 * (16 * LENGTH * 2));
                // the half step left over: a chunk that is there, times zero
                const u32 at = from + step * 32 - (2 * step + 1 < CHUNKS || lane < 16 ? 0 : 16);
#pragma unroll
                for (int r = 0; r < ROWS + 2; r++) {
                    u32 a[4];
                    matrices4(a, at + r * line);
#pragma unroll
                    for (int tap = 0; tap < 3; tap++)
#pragma unroll
                        for (int n = tap * PARTS; n < (tap + 1) * PARTS; n++)
                            if (r >= tap && r - tap < ROWS)
                                multiply(total[r - tap][n - tap * PARTS], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
                }
            }

            u16* to = y + (long long)(image * height + row + down) * (width * OUTER);
            int place[WRITES];  // of the chunks that this lane writes, or -1
#pragma unroll
            for (int j = 0; j < WRITES; j++) {
                const int chunk = j * 32 + lane, c = right + chunk / PARTS, n = image_of(c);
                place[j] = (n * (height - 1) * width + c) * OUTER + chunk % PARTS * 8;
                if (chunk >= 16 * PARTS || c >= columns) place[j] = -1;
            }
#pragma unroll
            for (int m = 0; m < ROWS; m++) {
                if (down + m >= rows || row + down + m >= height) break;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int p = half * 8 + lane / 4;
#pragma unroll
                    for (int part = 0; part < PARTS; part++) {
                        u32 both = pair(total[m][part][2 * half], total[m][part][2 * half + 1]);
                        if (SUMS && right + p >= columns) both = 0;
                        *reinterpret_cast<u32*>(own + (p * OUTER + part * 8 + lane % 4 * 2) * 2) = both;
                    }
                }
                __syncwarp();
                if (SUMS) add_sums<OUTER, OUTER * 2>(sum, shared_address(own));
#pragma unroll
                for (int j = 0; j < WRITES; j++)
                    if (place[j] >= 0)
                        *reinterpret_cast<uint4*>(to + place[j]) = *reinterpret_cast<const uint4*>(own + (j * 32 + lane) * 16);
                to += width * OUTER;
                __syncwarp();
            }
        }
        if (SUMS) gather<OUTER>(gathered + ((apart ? now : 0) * warps + warp) * 2 * OUTER, sum, !apart && tile != blockIdx.x);
    }
    if (SUMS) {
        __syncthreads();
        const int last = (tiles - 1 - blockIdx.x) / gridDim.x * gridDim.x + blockIdx.x;
        write_sums<OUTER>(sums + (apart ? last : blockIdx.x) * 2 * OUTER, gathered + (apart ? now ^ 1 : 0) * warps * 2 * OUTER);
    }
}

// For each block the sums over its tiles of dy's channels times the neighbours in x: (block, output channel, tap, input
// channel). Four warps share the rows of the product.
template <int INNER, int OUTER>
__global__ void __launch_bounds__(128, INNER <= 24 && OUTER <= 24 ? 4 : 2) weight_gradient(
    const u16* __restrict__ x, const u16* __restrict__ dy, float* __restrict__ partial,
    int images, int height, int width, int rows, int together, int tiles) {
    constexpr int WARPS = 4, EACH = INNER / 8, CHUNKS = 9 * EACH, ROWS = ((CHUNKS + 1) / 2 + WARPS - 1) / WARPS;
    constexpr int PARTS = OUTER / 8;
    extern __shared__ __align__(16) unsigned char shared[];
    const Tile t = {images, height, width, rows, together, static_cast<u32>((height + rows - 1) / rows)};
    const int count = t.pixels(), padded = (count + 15) / 16 * 16;
    const int bordered = together * (rows + 2) * (width + 2) * INNER * 2, stage = bordered + padded * OUTER * 2;
    u32* places = reinterpret_cast<u32*>(shared + 2 * stage);  // of the pixels' neighbours, the same in every tile
    const u32 base = shared_address(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int line = (width + 2) * INNER * 2;
    int offset[ROWS];  // of this lane's chunk: tap and channels
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
        int q = 2 * (m * WARPS + warp) + lane / 8 % 2;
        q = q < CHUNKS ? q : CHUNKS - 1;
        int tap = q / EACH;
        offset[m] = tap / 3 * line + (tap % 3 * EACH + q % EACH) * 16;
    }
    float total[ROWS][PARTS][4] = {};
    fetch_lines<INNER>(base, x, t, blockIdx.x);
    fetch<OUTER>(base + bordered, dy, t, blockIdx.x, padded);
    copies_begun();
    for (int p = threadIdx.x; p < padded; p += blockDim.x) places[p] = t.place(p < count ? p : 0) * (INNER * 2);
    clear_sides<INNER>(shared, t);
    clear_sides<INNER>(shared + stage, t);
    int now = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, now ^= 1) {
        copies_done<0>();
        __syncthreads();  // the tile is here, and no one needs the one before
        if (tile + gridDim.x < tiles) {
            const u32 next = base + (now ^ 1) * stage;
            fetch_lines<INNER>(next, x, t, tile + gridDim.x);
            fetch<OUTER>(next + bordered, dy, t, tile + gridDim.x, padded);
        }
        copies_begun();
        const u32 xs = base + now * stage, gs = xs + bordered;
        u32 place = places[lane % 8 + lane / 16 * 8];
#pragma unroll 2
        for (int first = 0; first < padded; first += 16) {
            u32 b[(PARTS + 1) / 2][4];
            const u32 gradients = gs + (first + lane % 16) * (OUTER * 2);
#pragma unroll
            for (int n = 0; n < PARTS / 2; n++) transposed4(b[n], gradients + (2 * n + lane / 16) * 16);
            if (PARTS % 2) transposed2(b[PARTS / 2], gradients + (PARTS - 1) * 16);
            const u32 pixel = xs + place;
            place = places[min(first + 16, padded - 16) + lane % 8 + lane / 16 * 8];  // the next one's, in time
#pragma unroll
            for (int m = 0; m < ROWS; m++) {
                u32 a[4];
                transposed4(a, pixel + offset[m]);
#pragma unroll
                for (int n = 0; n < PARTS; n++) multiply(total[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
            }
        }
    }
    put_rows<ROWS, PARTS>(partial + (long long)blockIdx.x * (OUTER * 9 * INNER), total, warp, WARPS, CHUNKS);
}
