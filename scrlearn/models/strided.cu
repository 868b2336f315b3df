// The two convolutions of stride 2 that a block of a ResNet begins with, at once: 3x3 (padding 1), and the 1x1 of its
// shortcut. Forward, the gradient of their input, and those of both weights.
//
// They read the same pixels. As in convolution.cu, a tile is taken into shared memory once, ldmatrix reads a pixel's
// neighbours from where they lie, and a block goes from tile to tile, with the next one on its way while one is worked
// on. A tile is some rows of the results (or some small images), whose pixels are counted through, as they lie in memory.
// Images are bfloat16 with channels last; weights are float32 as (output channel, tap, input channel). INNER and OUTER
// are multiples of 8. All sums have a fixed order.

#include "tensor_cores.cuh"

constexpr int WARPS = 8, GROUPS = 2;  // of a block; of sixteen pixels, which a warp works on at once

template <int INNER, int OUTER>
constexpr int BLOCKS = INNER + OUTER <= 64 ? 2 : 1;  // that a processor has registers for

template <int CHANNELS>
constexpr int PITCH = (CHANNELS / 8 | 1) * 16;  // bytes from pixel to pixel: an odd number of chunks, to meet all banks
template <int CHUNKS>
constexpr int LINE_OF_WEIGHTS = (CHUNKS + 1) / 2 * 16 + 8;  // eight more, for the same reason

struct Piece {  // a tile: its first image and row of the results, its pixels, and where the first one is
    int image, row, count, first;
};

struct Grid {  // where pixels lie
    int images, height, width;  // of the input
    int rows, together;         // a tile: so many rows of the results of so many images
    int down, right;            // height and width of the results
    u32 strips;                 // tiles one below the other in an image
    u32 by_right, by_rows;      // for divisions

    __device__ __forceinline__ Grid(int images, int height, int width, int rows, int together)
        : images(images), height(height), width(width), rows(rows), together(together), down((height + 1) / 2),
          right((width + 1) / 2), strips((down + rows - 1) / rows), by_right(0x7fffffffu / right + 1),
          by_rows(0x7fffffffu / rows + 1) {}
    __device__ __forceinline__ int pixels() const { return together * rows * right; }
    __device__ __forceinline__ Piece piece(u32 tile) const {
        const int group = tile / strips, image = group * together;
        const int row = (tile - group * strips) * rows;
        const int lines = strips == 1 ? min(together, images - image) * down : min(rows, down - row);
        return {image, row, lines * right, (image * down + row) * right};
    }
    __device__ __forceinline__ int row_of(int p) const { return static_cast<int>(__umulhi(2 * p, by_right)); }
    __device__ __forceinline__ int image_of(int row) const { return static_cast<int>(__umulhi(2 * row, by_rows)); }
    // bytes of a line of the input in shared memory, and from its odd columns to its even ones
    template <int CHANNELS>
    __device__ __forceinline__ int line() const { return (2 * right + 1) * PITCH<CHANNELS>; }
    template <int CHANNELS>
    __device__ __forceinline__ int even() const { return (right + 1) * PITCH<CHANNELS>; }
    // where the upper left neighbour of a result's pixel is in a tile of the input
    template <int CHANNELS>
    __device__ __forceinline__ int place(int p) const {
        const int row = row_of(p);
        return (2 * row + image_of(row)) * line<CHANNELS>() + (p - row * right) * PITCH<CHANNELS>;
    }
    // where tap and channels of a chunk are from there: a line's odd columns come first, then its even ones
    template <int CHANNELS, int TAPS>
    __device__ __forceinline__ int chunk(int q) const {
        constexpr int EACH = CHANNELS / 8;
        const int tap = TAPS == 1 ? 4 : q / EACH, column = tap % 3;
        return tap / 3 * line<CHANNELS>() + (column == 1 ? even<CHANNELS>() : column / 2 * PITCH<CHANNELS>) + q % EACH * 16;
    }
};

// A tile of the input with the line above, a line by a warp; lines outside the images are zeros. Odd columns come first,
// so that pixels that one tap reads lie side by side. After 32 pixels a lane's chunks are of the same channels again.
template <int CHANNELS>
__device__ __forceinline__ void fetch_input(u32 to, const u16* x, const Grid& g, const Piece& piece) {
    constexpr int EACH = CHANNELS / 8;
    const int lane = threadIdx.x % 32, chunks = g.width * EACH, lines = 2 * g.rows + 1;
    u32 place[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int column = (j * 32 + lane) / EACH, slot = column / 2 + (column % 2 ? 1 : g.right + 1);
        place[j] = slot * PITCH<CHANNELS> + (j * 32 + lane) % EACH * 16;
    }
    for (int line = threadIdx.x / 32; line < g.together * lines; line += blockDim.x / 32) {
        const int among = g.together == 1 ? 0 : line / lines;
        const int n = piece.image + among, r = 2 * piece.row - 1 + line - among * lines;
        const bool inside = n < g.images && r >= 0 && r < g.height;
        const u16* from = x + (inside ? (long long)(n * g.height + r) * g.width * CHANNELS : 0) + lane * 8;
        u32 at = to + line * g.line<CHANNELS>();
        for (int i = lane; i < chunks; i += 32 * EACH, at += 16 * PITCH<CHANNELS>, from += 32 * CHANNELS)
#pragma unroll
            for (int j = 0; j < EACH; j++)
                if (i + j * 32 < chunks) copy16(at + place[j], from + j * 256, inside);
    }
}

// the columns left and right of a tile's images, which stay zero
template <int CHANNELS>
__device__ __forceinline__ void clear_input(unsigned char* to, const Grid& g) {
    constexpr int EACH = CHANNELS / 8;
    const int sides = 1 + g.width % 2, all = g.together * (2 * g.rows + 1) * sides * EACH;
    for (int i = threadIdx.x; i < all; i += blockDim.x) {
        const int slot = i / EACH, line = slot / sides;
        unsigned char* at = to + line * g.line<CHANNELS>() + (slot - line * sides) * g.right * PITCH<CHANNELS>;
        reinterpret_cast<uint4*>(at)[i % EACH] = uint4{0, 0, 0, 0};
    }
}

// Lines of weights as bfloat16, a line for an output channel. Many are asked for before the first is waited for: no
// branch may come between, so the last ones are written more than once.
template <int LINES, int CHUNKS>
__device__ __forceinline__ void take_weights(u16* to, const float* __restrict__ w) {
    constexpr int LENGTH = LINE_OF_WEIGHTS<CHUNKS>, ALL = LINES * CHUNKS, AT_ONCE = ALL > 800 ? 8 : 4;
    for (int first = threadIdx.x; first < ALL; first += AT_ONCE * blockDim.x) {
        float4 a[AT_ONCE], b[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const float4* from = reinterpret_cast<const float4*>(w) + 2 * min(first + j * blockDim.x, ALL - 1);
            a[j] = from[0];
            b[j] = from[1];
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = min(first + j * blockDim.x, ALL - 1), line = i / CHUNKS;
            *reinterpret_cast<uint4*>(to + line * LENGTH + (i - line * CHUNKS) * 8) =
                uint4{pair(a[j].x, a[j].y), pair(a[j].z, a[j].w), pair(b[j].x, b[j].y), pair(b[j].z, b[j].w)};
        }
    }
    if (CHUNKS % 2)  // half a step is left
        for (int i = threadIdx.x; i < LINES; i += blockDim.x)
            *reinterpret_cast<uint4*>(to + i * LENGTH + CHUNKS * 8) = uint4{0, 0, 0, 0};
}

// a step's weights for all parts of the result, eight channels each
template <int PARTS, int LENGTH>
__device__ __forceinline__ void step_of_weights(u32 (&b)[(PARTS + 1) / 2][4], u32 from) {
#pragma unroll
    for (int n = 0; n < PARTS / 2; n++) matrices4(b[n], from + n * (16 * LENGTH * 2));
    if (PARTS % 2) matrices2(b[PARTS / 2], from + PARTS / 2 * (16 * LENGTH * 2));
}

// a step's products, of pixels at these places with its weights
template <int PARTS>
__device__ __forceinline__ void add_products(float (&total)[GROUPS][PARTS][4], const u32 (&from)[GROUPS], int at,
                                             const u32 (&b)[(PARTS + 1) / 2][4]) {
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        u32 a[4];
        matrices4(a, from[group] + at);
#pragma unroll
        for (int n = 0; n < PARTS; n++) multiply(total[group][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
}

// where a lane reads weights
template <int LENGTH>
__device__ __forceinline__ u32 own_weights(u32 from) {
    const int lane = threadIdx.x % 32;
    return from + (lane / 16 * 8 + lane % 8) * (LENGTH * 2) + lane / 8 % 2 * 16;
}

// Sixteen pixels of a result in bfloat16, by way of shared memory, and their sums.
template <int OUTER, bool SUMS>
__device__ __forceinline__ void write_out(u16* to, unsigned char* own, const float (&total)[OUTER / 8][4], int left,
                                          float (&sum)[OUTER / 8][4]) {
    constexpr int PARTS = OUTER / 8;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int p = half * 8 + lane / 4;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            u32* at = reinterpret_cast<u32*>(own + p * PITCH<OUTER> + part * 16 + lane % 4 * 4);
            *at = pair(total[part][2 * half], total[part][2 * half + 1]);
        }
    }
    __syncwarp();
    if (SUMS && left < 16) {  // what is behind the last pixel is in no sum
        for (int i = left * (PITCH<OUTER> / 16) + lane; i < PITCH<OUTER>; i += 32)
            reinterpret_cast<uint4*>(own)[i] = uint4{0, 0, 0, 0};
        __syncwarp();
    }
    if (SUMS) add_sums<OUTER, PITCH<OUTER>>(sum, shared_address(own));
    uint4 chunks[(PARTS + 1) / 2];
#pragma unroll
    for (int j = 0; j < (PARTS + 1) / 2; j++) {
        const int i = min(j * 32 + lane, 16 * PARTS - 1), place = PARTS % 2 ? i * 16 : i / PARTS * PITCH<OUTER> + i % PARTS * 16;
        chunks[j] = *reinterpret_cast<const uint4*>(own + place);
    }
    left = min(left, 16) * PARTS;
#pragma unroll
    for (int j = 0; j < (PARTS + 1) / 2; j++)
        if (j * 32 + lane < left) reinterpret_cast<uint4*>(to)[j * 32 + lane] = chunks[j];
    __syncwarp();
}

// One result of a tile: 3x3 or 1x1. The first warps to begin are those that the result before has left free.
template <int TAPS, int INNER, int OUTER, bool SUMS>
__device__ __forceinline__ void result(u16* y, unsigned char* own, float* gathered, u32 pixels, u32 weights, const Grid& g,
                                       const Piece& piece, int begin, bool add) {
    constexpr int PARTS = OUTER / 8, CHUNKS = TAPS * INNER / 8, LENGTH = LINE_OF_WEIGHTS<CHUNKS>;
    const int lane = threadIdx.x % 32, count = piece.count;
    y += (long long)piece.first * OUTER;
    weights = own_weights<LENGTH>(weights);
    float sum[PARTS][4] = {};
    for (int first = begin * (GROUPS * 16); first < count; first += WARPS * GROUPS * 16) {
        u32 from[GROUPS];
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
            from[group] = pixels + g.place<INNER>(min(first + group * 16 + lane % 16, count - 1));
        float total[GROUPS][PARTS][4] = {};
#pragma unroll
        for (int step = 0; step < (CHUNKS + 1) / 2; step++) {
            u32 b[(PARTS + 1) / 2][4];
            step_of_weights<PARTS, LENGTH>(b, weights + step * 32);
            // the half step left over: a chunk that is there, times zero
            const int next = 2 * step + 1 < CHUNKS ? 2 * step + 1 : 2 * step;
            const int at = lane < 16 ? g.chunk<INNER, TAPS>(2 * step) : g.chunk<INNER, TAPS>(next);
            add_products<PARTS>(total, from, at, b);
        }
#pragma unroll
        for (int group = 0; group < GROUPS; group++)
            if (first + group * 16 < count)
                write_out<OUTER, SUMS>(y + (first + group * 16) * OUTER, own, total[group], count - first - group * 16, sum);
    }
    if (SUMS) gather<OUTER>(gathered, sum, add);
}

// a tile's or a block's sums for both results, of what its warps have gathered: one part of so many
template <int OUTER>
__device__ __forceinline__ void write_sums(float* sums, const float* gathered, int part, int parts) {
    for (int i = threadIdx.x; i < 4 * OUTER; i += blockDim.x) {
        const int which = i / (2 * OUTER), column = i % (2 * OUTER);
        float whole = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) whole += gathered[(which * WARPS + warp) * 2 * OUTER + column];
        sums[(which * parts + part) * 2 * OUTER + column] = whole;
    }
}

// y = x * w and y1 = x * w1, and the sums of y's channels and of their squares, then of y1's: for each tile (`apart`), or
// for each block.
template <int INNER, int OUTER, bool SUMS>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS<INNER, OUTER>) downsample(
    const u16* __restrict__ x, const float* __restrict__ w, const float* __restrict__ w1, u16* __restrict__ y,
    u16* __restrict__ y1, float* __restrict__ sums, int apart, int images, int height, int width, int rows, int together, int tiles) {
    constexpr int EACH = INNER / 8, LINES = OUTER * LINE_OF_WEIGHTS<9 * EACH>, LINES1 = OUTER * LINE_OF_WEIGHTS<EACH>;
    extern __shared__ __align__(16) unsigned char shared[];
    const Grid g(images, height, width, rows, together);
    const int warp = threadIdx.x / 32, stage = together * (2 * rows + 1) * g.line<INNER>();
    u16* weights = reinterpret_cast<u16*>(shared);
    float* gathered = reinterpret_cast<float*>(weights + LINES + LINES1);  // two tiles' sums, by results and warps
    unsigned char* own = reinterpret_cast<unsigned char*>(gathered + 8 * WARPS * OUTER);  // a warp's way out
    unsigned char* pixels = own + WARPS * 16 * PITCH<OUTER>;
    own += warp * 16 * PITCH<OUTER>;
    const u32 pixels_at = shared_address(pixels);

    fetch_input<INNER>(pixels_at, x, g, g.piece(blockIdx.x));
    copies_begun();
    take_weights<OUTER, 9 * EACH>(weights, w);
    take_weights<OUTER, EACH>(weights + LINES, w1);
    clear_input<INNER>(pixels, g);
    if (gridDim.x < tiles) clear_input<INNER>(pixels + stage, g);

    int now = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, now ^= 1) {
        copies_done<0>();
        __syncthreads();  // the tile is here, and no one needs the one before
        const int next = tile + gridDim.x;
        if (next < tiles) fetch_input<INNER>(pixels_at + (now ^ 1) * stage, x, g, g.piece(next));
        copies_begun();
        if (SUMS && apart && tile != blockIdx.x)
            write_sums<OUTER>(sums, gathered + (now ^ 1) * 4 * WARPS * OUTER, tile - gridDim.x, tiles);
        const bool add = !apart && tile != blockIdx.x;
        const Piece piece = g.piece(tile);
        const u32 here = pixels_at + now * stage;
        float* mine = gathered + ((apart ? now : 0) * 2 * WARPS + warp) * 2 * OUTER;
        result<9, INNER, OUTER, SUMS>(y, own, mine, here, shared_address(weights), g, piece, warp, add);
        const int busy = (piece.count + GROUPS * 16 - 1) / (GROUPS * 16), free = (warp + WARPS - busy % WARPS) % WARPS;
        mine += WARPS * 2 * OUTER;
        result<1, INNER, OUTER, SUMS>(y1, own, mine, here, shared_address(weights + LINES), g, piece, free, add);
    }
    if (SUMS) {
        __syncthreads();
        const int last = (tiles - 1 - blockIdx.x) / gridDim.x * gridDim.x + blockIdx.x;
        if (apart) write_sums<OUTER>(sums, gathered + (now ^ 1) * 4 * WARPS * OUTER, last, tiles);
        else write_sums<OUTER>(sums, gathered, blockIdx.x, gridDim.x);
    }
}

// pixels one after the other, by a warp: so many chunks that are given, of so many; the others are zeros
template <int CHANNELS>
__device__ __forceinline__ void copy_pixels(u32 to, const u16* from, int given, int chunks) {
    constexpr int EACH = CHANNELS / 8;
    const int lane = threadIdx.x % 32;
    from += lane * 8;
    for (int i = lane; i < chunks; i += 32 * EACH, to += 32 * PITCH<CHANNELS>, from += 32 * CHANNELS)
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const u32 at = to + (j * 32 + lane) / EACH * PITCH<CHANNELS> + (j * 32 + lane) % EACH * 16;
            if (i + j * 32 < chunks) copy16(at, from + j * 256, i + j * 32 < given);
        }
}

// A result's gradient on a tile, with one more line below if it is asked for, a line by a warp; zeros outside the images.
template <int CHANNELS>
__device__ __forceinline__ void fetch_result(u32 to, const u16* dy, const Grid& g, const Piece& piece, int below) {
    const int chunks = g.right * (CHANNELS / 8), lines = g.rows + below;
    for (int line = threadIdx.x / 32; line < g.together * lines; line += blockDim.x / 32) {
        const int among = g.together == 1 ? 0 : line / lines, r = line - among * lines;
        const bool inside = piece.image + among < g.images && piece.row + r < g.down;
        const u16* from = dy + (inside ? (long long)(piece.first + (among * g.down + r) * g.right) * CHANNELS : 0);
        const u32 at = to + (among * (g.rows + 1) + r) * (g.right + 1) * PITCH<CHANNELS>;
        copy_pixels<CHANNELS>(at, from, inside ? chunks : 0, chunks);
    }
}

// the column right of a result's lines, which stays zero
template <int CHANNELS>
__device__ __forceinline__ void clear_result(unsigned char* to, const Grid& g) {
    constexpr int EACH = CHANNELS / 8;
    for (int i = threadIdx.x; i < g.together * (g.rows + 1) * EACH; i += blockDim.x) {
        unsigned char* at = to + ((i / EACH + 1) * (g.right + 1) - 1) * PITCH<CHANNELS>;
        reinterpret_cast<uint4*>(at)[i % EACH] = uint4{0, 0, 0, 0};
    }
}

// On the way back, a pixel of a result and those right of it, below it and below right of it give the gradients of four
// pixels: upper left, upper right, lower left, lower right. These are the products of which they are sums, in ten slots,
// two for each of the first three and four for the last: the tap, and whose gradient. The second is of the 1x1.
__device__ __forceinline__ int tap_of(int slot) { return static_cast<int>(0x0268173504ull >> (4 * slot) & 15); }

// lines of weights as bfloat16, for each input channel the output channels of all ten slots
template <int INNER, int OUTER>
__device__ __forceinline__ void take_turned(u16* to, const float* __restrict__ w, const float* __restrict__ w1) {
    constexpr int LENGTH = LINE_OF_WEIGHTS<10 * OUTER / 8>, EACH = INNER / 4, ALL = 10 * OUTER / 2 * EACH;
    constexpr int AT_ONCE = ALL > 800 ? 8 : 4;
    for (int first = threadIdx.x; first < ALL; first += AT_ONCE * blockDim.x) {
        float4 a[AT_ONCE], b[AT_ONCE];  // four input channels of two output channels
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = min(first + j * blockDim.x, ALL - 1), inner = i % EACH, outer = i / EACH % (OUTER / 2) * 2;
            const int slot = i / (EACH * OUTER / 2), taps = slot == 1 ? 1 : 9;
            const float4* from = reinterpret_cast<const float4*>(slot == 1 ? w1 : w) + inner;
            from += (outer * taps + tap_of(slot)) * EACH;
            a[j] = from[0];
            b[j] = from[taps * EACH];
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
            const int i = min(first + j * blockDim.x, ALL - 1), inner = i % EACH * 4, k = i / EACH * 2;
            u32* at = reinterpret_cast<u32*>(to + inner * LENGTH + k);
            at[0] = pair(a[j].x, b[j].x);
            at[LENGTH / 2] = pair(a[j].y, b[j].y);
            at[LENGTH] = pair(a[j].z, b[j].z);
            at[LENGTH / 2 * 3] = pair(a[j].w, b[j].w);
        }
    }
}

// The products of some slots. Where a slot's gradient is: in this pixel, right of it, below it, or both; or `one` further,
// in that of the 1x1.
template <int INNER, int OUTER, int FIRST, int SLOTS>
__device__ __forceinline__ void add_slots(float (&total)[GROUPS][INNER / 8][4], const u32 (&from)[GROUPS], u32 weights,
                                          int line, int one) {
    constexpr int EACH = OUTER / 8, PARTS = INNER / 8, LENGTH = LINE_OF_WEIGHTS<10 * EACH>;
    auto place = [=](int q) {
        const int slot = FIRST + q / EACH;
        const bool below = slot == 5 || slot >= 8, beside = slot == 3 || slot == 7 || slot == 9;
        return (slot == 1 ? one : (below ? line : 0) + (beside ? PITCH<OUTER> : 0)) + q % EACH * 16;
    };
#pragma unroll
    for (int step = 0; step < SLOTS * EACH / 2; step++) {
        u32 b[(PARTS + 1) / 2][4];
        step_of_weights<PARTS, LENGTH>(b, weights + (FIRST * EACH + 2 * step) * 16);
        const int at = threadIdx.x % 32 < 16 ? place(2 * step) : place(2 * step + 1);
        add_products<PARTS>(total, from, at, b);
    }
}

// Sixteen pairs of pixels, side by side in a line of the input's gradient, by way of shared memory.
template <int INNER>
__device__ __forceinline__ void write_pairs(u16* dx, unsigned char* own, const float (&left)[INNER / 8][4],
                                            const float (&right)[INNER / 8][4], const Grid& g, const Piece& piece, int first,
                                            int lower) {
    constexpr int EACH = INNER / 8, LENGTH = 4 * INNER + 16;  // bytes of a pair; sixteen more, to meet all banks
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int part = 0; part < EACH; part++) {
            u32* at = reinterpret_cast<u32*>(own + (half * 8 + lane / 4) * LENGTH + part * 16 + lane % 4 * 4);
            at[0] = pair(left[part][2 * half], left[part][2 * half + 1]);
            at[INNER / 2] = pair(right[part][2 * half], right[part][2 * half + 1]);
        }
    __syncwarp();
    const int above = 2 * piece.row + lower;
    dx += (long long)(piece.image * g.height + above) * g.width * INNER;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int i = j * 32 + lane, p = i / (2 * EACH), chunk = i % (2 * EACH);
        const int row = g.row_of(first + p), column = 2 * (first + p - row * g.right), image = g.image_of(row);
        const int r = 2 * (row - image * g.rows);  // in the tile
        const bool inside = first + p < piece.count && above + r < g.height;
        if (inside && column + chunk / EACH < g.width)
            *reinterpret_cast<uint4*>(dx + ((image * g.height + r) * g.width + column) * INNER + chunk * 8) =
                *reinterpret_cast<const uint4*>(own + p * LENGTH + chunk * 16);
    }
    __syncwarp();
}

// dx, of the gradients of both results. A warp makes upper or lower pixels.
template <int INNER, int OUTER>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS<INNER, OUTER>) downsample_back(
    const u16* __restrict__ dy, const u16* __restrict__ dy1, const float* __restrict__ w, const float* __restrict__ w1,
    u16* __restrict__ dx, int images, int height, int width, int rows, int together, int tiles) {
    constexpr int LENGTH = LINE_OF_WEIGHTS<10 * OUTER / 8>, WAY = 16 * (4 * INNER + 16);
    extern __shared__ __align__(16) unsigned char shared[];
    const Grid g(images, height, width, rows, together);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int line = (g.right + 1) * PITCH<OUTER>, one = together * (rows + 1) * line;
    unsigned char* pixels = shared + INNER * LENGTH * 2 + WARPS * WAY;
    unsigned char* own = shared + INNER * LENGTH * 2 + warp * WAY;
    const u32 pixels_at = shared_address(pixels), weights = own_weights<LENGTH>(shared_address(shared));

    auto fetch = [&](u32 to, const Piece& piece) {
        fetch_result<OUTER>(to, dy, g, piece, 1);
        fetch_result<OUTER>(to + one, dy1, g, piece, 0);
    };
    fetch(pixels_at, g.piece(blockIdx.x));
    copies_begun();
    take_turned<INNER, OUTER>(reinterpret_cast<u16*>(shared), w, w1);
    clear_result<OUTER>(pixels, g);
    if (gridDim.x < tiles) clear_result<OUTER>(pixels + 2 * one, g);

    int now = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, now ^= 1) {
        copies_done<0>();
        __syncthreads();  // the tile is here, and no one needs the one before
        const int next = tile + gridDim.x;
        if (next < tiles) fetch(pixels_at + (now ^ 1) * 2 * one, g.piece(next));
        copies_begun();
        const Piece piece = g.piece(tile);
        const int count = piece.count, tasks = (count + GROUPS * 16 - 1) / (GROUPS * 16);
        for (int task = warp; task < 2 * tasks; task += WARPS) {
            const bool lower = task < tasks;
            const int first = (lower ? task : task - tasks) * (GROUPS * 16);
            u32 from[GROUPS];
#pragma unroll
            for (int group = 0; group < GROUPS; group++) {
                const int p = min(first + group * 16 + lane % 16, count - 1), row = g.row_of(p);
                from[group] = pixels_at + now * 2 * one + (row + g.image_of(row)) * line + (p - row * g.right) * PITCH<OUTER>;
            }
            float left[GROUPS][INNER / 8][4] = {}, right[GROUPS][INNER / 8][4] = {};
            if (lower) {
                add_slots<INNER, OUTER, 4, 2>(left, from, weights, line, one);
                add_slots<INNER, OUTER, 6, 4>(right, from, weights, line, one);
            } else {
                add_slots<INNER, OUTER, 0, 2>(left, from, weights, line, one);
                add_slots<INNER, OUTER, 2, 2>(right, from, weights, line, one);
            }
#pragma unroll
            for (int group = 0; group < GROUPS; group++)
                write_pairs<INNER>(dx, own, left[group], right[group], g, piece, first + group * 16, lower);
        }
    }
}

// a result's gradient on a tile, 32 pixels by a warp; zeros behind its last one
template <int CHANNELS>
__device__ __forceinline__ void fetch_pixels(u32 to, const u16* dy, const Piece& piece, int padded) {
    constexpr int EACH = CHANNELS / 8;
    for (int p = threadIdx.x / 32 * 32; p < padded; p += blockDim.x)
        copy_pixels<CHANNELS>(to + p * PITCH<CHANNELS>, dy + (long long)(piece.first + p) * CHANNELS, (piece.count - p) * EACH,
                              min(32, padded - p) * EACH);
}

template <int INNER, int OUTER>
constexpr int SHARING = BLOCKS<INNER, OUTER> == 2 ? 3 : 7;  // warps that share the rows of the 3x3's product

// For each block the sums over its tiles of the gradients' channels times the neighbours in x: (block, output channel,
// tap, input channel) of the 3x3, and behind it that of the 1x1, which one more warp makes.
template <int INNER, int OUTER>
__global__ void __launch_bounds__(SHARING<INNER, OUTER> * 32 + 32, BLOCKS<INNER, OUTER>) downsample_weights(
    const u16* __restrict__ x, const u16* __restrict__ dy, const u16* __restrict__ dy1, float* __restrict__ partial,
    int images, int height, int width, int rows, int together, int tiles) {
    constexpr int EACH = INNER / 8, PARTS = OUTER / 8;
    constexpr int ROWS = ((9 * EACH + 1) / 2 + SHARING<INNER, OUTER> - 1) / SHARING<INNER, OUTER>;  // of two chunks
    static_assert((EACH + 1) / 2 <= ROWS, "one warp has the whole 1x1");
    extern __shared__ __align__(16) unsigned char shared[];
    const Grid g(images, height, width, rows, together);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, padded = (g.pixels() + 15) / 16 * 16;
    const int input = together * (2 * rows + 1) * g.line<INNER>(), one = padded * PITCH<OUTER>, stage = input + 2 * one;
    u32* places = reinterpret_cast<u32*>(shared + 2 * stage);  // of the pixels' neighbours, the same in every tile
    const u32 base = shared_address(shared);
    const bool small = warp == SHARING<INNER, OUTER>;  // the 1x1
    const int chunks = small ? EACH : 9 * EACH, begin = small ? 0 : warp, stride = small ? 1 : SHARING<INNER, OUTER>;
    int offset[ROWS];  // of this lane's chunks
#pragma unroll
    for (int m = 0; m < ROWS; m++) {
        const int q = min(2 * (m * stride + begin) + lane / 8 % 2, chunks - 1);
        offset[m] = small ? g.chunk<INNER, 1>(q) : g.chunk<INNER, 9>(q);
    }

    auto fetch = [&](u32 to, const Piece& piece) {
        fetch_input<INNER>(to, x, g, piece);
        fetch_pixels<OUTER>(to + input, dy, piece, padded);
        fetch_pixels<OUTER>(to + input + one, dy1, piece, padded);
    };
    fetch(base, g.piece(blockIdx.x));
    copies_begun();
    for (int p = threadIdx.x; p < padded; p += blockDim.x) places[p] = g.place<INNER>(p < g.pixels() ? p : 0);
    clear_input<INNER>(shared, g);
    clear_input<INNER>(shared + stage, g);

    float total[ROWS][PARTS][4] = {};
    int now = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, now ^= 1) {
        copies_done<0>();
        __syncthreads();  // the tile is here, and no one needs the one before
        const int next = tile + gridDim.x;
        if (next < tiles) fetch(base + (now ^ 1) * stage, g.piece(next));
        copies_begun();
        const u32 xs = base + now * stage, gs = xs + input + (small ? one : 0) + lane % 16 * PITCH<OUTER>;
        u32 place = places[lane % 8 + lane / 16 * 8];
#pragma unroll 2
        for (int first = 0; first < padded; first += 16) {
            u32 b[(PARTS + 1) / 2][4];
            const u32 gradients = gs + first * PITCH<OUTER>, pixel = xs + place;
            place = places[min(first + 16, padded - 16) + lane % 8 + lane / 16 * 8];  // the next one's, in time
#pragma unroll
            for (int n = 0; n < PARTS / 2; n++) transposed4(b[n], gradients + (2 * n + lane / 16) * 16);
            if (PARTS % 2) transposed2(b[PARTS / 2], gradients + (PARTS - 1) * 16);
#pragma unroll
            for (int m = 0; m < ROWS; m++) {
                u32 a[4];
                transposed4(a, pixel + offset[m]);
#pragma unroll
                for (int n = 0; n < PARTS; n++) multiply(total[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
            }
        }
    }
    float* to = partial + (long long)blockIdx.x * (OUTER * 10 * INNER) + (small ? OUTER * 9 * INNER : 0);
    put_rows<ROWS, PARTS>(to, total, begin, stride, chunks);
}
