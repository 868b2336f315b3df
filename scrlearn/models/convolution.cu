// 3x3 convolutions of few channels (stride 1, padding 1): forward, the gradient of the input, and of the weights.
//
// A block takes a tile, some rows of an image (or some small images), into shared memory once, with a border of one
// pixel. A row of the product's left side is then a pixel and its neighbours, in chunks of eight channels, read by
// ldmatrix from where they lie: nothing is copied nine times. Images are bfloat16 with channels last; weights are
// float32 as (output channel, tap, input channel). INNER and OUTER are multiples of 8. All sums have a fixed order.

typedef unsigned int u32;
typedef unsigned short u16;

#ifndef EMULATED
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void copy16(u32 to, const void* from, bool inside) {  // zeros where it is outside
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0));
}

__device__ __forceinline__ void copies_begun() { asm volatile("cp.async.commit_group;"); }

template <int BEHIND>
__device__ __forceinline__ void copies_done() {
    asm volatile("cp.async.wait_group %0;" ::"n"(BEHIND) : "memory");
}

__device__ __forceinline__ void matrices4(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ void transposed4(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ u32 pair(float low, float high) {  // two bfloat16, rounded to nearest
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float low(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(u32 both) { return __uint_as_float(both & 0xffff0000u); }
#endif

struct Tile {  // where a block's pixels lie
    int images, height, width;  // of the whole batch
    int rows, together;         // a tile: so many rows of so many images
    int strips;                 // tiles one below the other in an image

    __device__ __forceinline__ int first_image(int tile) const { return tile / strips * together; }
    __device__ __forceinline__ int first_row(int tile) const { return tile % strips * rows; }
    __device__ __forceinline__ int pixels() const { return together * rows * width; }
    // the place, in a tile with its border, of the upper left neighbour of pixel p
    __device__ __forceinline__ int place(int p) const {
        int row = p / width, image = row / rows;
        return (row + 2 * image) * (width + 2) + p - row * width;
    }
};

// a tile with its border
template <int CHANNELS>
__device__ __forceinline__ void fetch_with_border(u32 to, const u16* x, const Tile& t, int tile) {
    constexpr int CHUNKS = CHANNELS / 8;
    int image = t.first_image(tile), row = t.first_row(tile) - 1;
    int wide = t.width + 2, high_ = t.rows + 2;
    for (int i = threadIdx.x; i < t.together * high_ * wide * CHUNKS; i += blockDim.x) {
        int place = i / CHUNKS, chunk = i - place * CHUNKS;
        int line = place / wide, c = place - line * wide - 1;
        int n = line / high_, r = row + line - n * high_;
        n += image;
        bool inside = n < t.images && r >= 0 && r < t.height && c >= 0 && c < t.width;
        long long from = inside ? ((long long)(n * t.height + r) * t.width + c) * CHANNELS + chunk * 8 : 0;
        copy16(to + i * 16, x + from, inside);
    }
}

// a tile without it: rows below the image are zeros
template <int CHANNELS>
__device__ __forceinline__ void fetch(u32 to, const u16* x, const Tile& t, int tile, int padded) {
    constexpr int CHUNKS = CHANNELS / 8;
    int image = t.first_image(tile), row = t.first_row(tile);
    for (int i = threadIdx.x; i < padded * CHUNKS; i += blockDim.x) {
        int p = i / CHUNKS, chunk = i - p * CHUNKS;
        int line = p / t.width, c = p - line * t.width;
        int n = line / t.rows, r = row + line - n * t.rows;
        n += image;
        bool inside = p < t.pixels() && n < t.images && r < t.height;
        long long from = inside ? ((long long)(n * t.height + r) * t.width + c) * CHANNELS + chunk * 8 : 0;
        copy16(to + i * 16, x + from, inside);
    }
}

// y = x * w, and for each block the sums of y's channels and of their squares. BACKWARD: x is the gradient of a result,
// w the weights of the convolution that made it (as INNER, tap, OUTER), y the gradient of its input.
template <int INNER, int OUTER, bool BACKWARD, bool SUMS>
__global__ void __launch_bounds__(256, OUTER <= 40 ? 2 : 1) convolve(
    const u16* __restrict__ x, const float* __restrict__ w, u16* __restrict__ y, float* __restrict__ sums,
    int images, int height, int width, int rows, int together) {
    constexpr int CHUNKS = 9 * INNER / 8, STEPS = (CHUNKS + 1) / 2, PARTS = OUTER / 8, ROWS = 4;
    constexpr int LENGTH = STEPS * 16 + 8;  // of a row of weights: eight more, so that reads meet all banks
    extern __shared__ __align__(16) unsigned char shared[];
    u16* weights = reinterpret_cast<u16*>(shared);
    const u32 weights_at = shared_address(shared), pixels_at = weights_at + OUTER * LENGTH * 2;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Tile t = {images, height, width, rows, together, (height + rows - 1) / rows};

    fetch_with_border<INNER>(pixels_at, x, t, blockIdx.x);
    copies_begun();
    for (int i = 4 * threadIdx.x; i < OUTER * 9 * INNER; i += 4 * blockDim.x) {
        const float4 four = *reinterpret_cast<const float4*>(w + i);
        const u32 first = pair(four.x, four.y), second = pair(four.z, four.w);
        if (BACKWARD) {  // taps turned around
            int tap = i / OUTER, n = i - tap * OUTER, from = tap / 9;
            u16* to = weights + n * LENGTH + (8 - (tap - from * 9)) * INNER + from;
            to[0] = static_cast<u16>(first);
            to[LENGTH] = static_cast<u16>(first >> 16);
            to[2 * LENGTH] = static_cast<u16>(second);
            to[3 * LENGTH] = static_cast<u16>(second >> 16);
        } else {
            int n = i / (9 * INNER);
            u32* to = reinterpret_cast<u32*>(weights + n * LENGTH + i - n * (9 * INNER));
            to[0] = first;
            to[1] = second;
        }
    }
    if (STEPS * 16 > 9 * INNER)
        for (int i = threadIdx.x; i < OUTER * 8; i += blockDim.x) weights[i / 8 * LENGTH + 9 * INNER + i % 8] = 0;
    copies_done<0>();
    __syncthreads();

    const int count = t.pixels();
    u32 from[ROWS];
    for (int m = 0; m < ROWS; m++) {
        int p = (warp * ROWS + m) * 16 + lane % 16;
        from[m] = pixels_at + t.place(p < count ? p : 0) * (INNER * 2);
    }
    const u32 row_of_weights = weights_at + ((lane / 16) * 8 + lane % 8) * (LENGTH * 2) + (lane / 8 % 2) * 16;
    const int line = (width + 2) * INNER * 2;
    float total[ROWS][PARTS][4] = {};
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        u32 b[(PARTS + 1) / 2][4];
#pragma unroll
        for (int n = 0; n < (PARTS + 1) / 2; n++)  // the last of an odd number is read twice
            matrices4(b[n], row_of_weights + step * 32 + (2 * n + 1 < PARTS ? n * 16 : lane < 16 ? n * 16 : n * 16 - 8) * (LENGTH * 2));
        const int q0 = 2 * step, q1 = 2 * step + 1 < CHUNKS ? 2 * step + 1 : CHUNKS - 1;
        constexpr int EACH = INNER / 8;
        const int tap0 = q0 / EACH, tap1 = q1 / EACH;
        const int off0 = tap0 / 3 * line + (tap0 % 3 * EACH + q0 % EACH) * 16;
        const int off1 = tap1 / 3 * line + (tap1 % 3 * EACH + q1 % EACH) * 16;
        const int offset = lane < 16 ? off0 : off1;
#pragma unroll
        for (int m = 0; m < ROWS; m++) {
            u32 a[4];
            matrices4(a, from[m] + offset);
#pragma unroll
            for (int n = 0; n < PARTS; n++) multiply(total[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
        }
    }

    const int image = t.first_image(blockIdx.x), row = t.first_row(blockIdx.x);
    float sum[PARTS][2] = {}, square[PARTS][2] = {};
#pragma unroll
    for (int m = 0; m < ROWS; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int p = (warp * ROWS + m) * 16 + half * 8 + lane / 4;
            int r = p / width, c = p - r * width, n = r / rows;
            r += row - n * rows;
            n += image;
            if (p >= count || n >= images || r >= height) continue;
            u16* to = y + ((long long)(n * height + r) * width + c) * OUTER + lane % 4 * 2;
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                u32 both = pair(total[m][part][2 * half], total[m][part][2 * half + 1]);
                *reinterpret_cast<u32*>(to + part * 8) = both;
                if (SUMS) {
                    float a = low(both), b = high(both);
                    sum[part][0] += a;
                    sum[part][1] += b;
                    square[part][0] += a * a;
                    square[part][1] += b * b;
                }
            }
        }
    if (!SUMS) return;
    __syncthreads();
    float* together_ = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            for (int other = 4; other < 32; other *= 2) {
                sum[part][i] += __shfl_xor_sync(0xffffffffu, sum[part][i], other);
                square[part][i] += __shfl_xor_sync(0xffffffffu, square[part][i], other);
            }
            if (lane < 4) {
                float* to = together_ + warp * 2 * OUTER + part * 8 + lane * 2 + i;
                to[0] = sum[part][i];
                to[OUTER] = square[part][i];
            }
        }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * OUTER; i += blockDim.x) {
        float whole = 0.0f;
        for (int j = 0; j < blockDim.x / 32; j++) whole += together_[j * 2 * OUTER + i];
        sums[blockIdx.x * 2 * OUTER + i] = whole;
    }
}

// For each block the sums over its tiles of dy's channels times the neighbours in x: (block, output channel, tap, input
// channel). Four warps share the rows of the product.
template <int INNER, int OUTER>
__global__ void __launch_bounds__(128, 2) weight_gradient(
    const u16* __restrict__ x, const u16* __restrict__ dy, float* __restrict__ partial,
    int images, int height, int width, int rows, int together, int tiles) {
    constexpr int WARPS = 4, EACH = INNER / 8, CHUNKS = 9 * EACH, ROWS = ((CHUNKS + 1) / 2 + WARPS - 1) / WARPS;
    constexpr int PARTS = OUTER / 8;
    extern __shared__ __align__(16) unsigned char shared[];
    const Tile t = {images, height, width, rows, together, (height + rows - 1) / rows};
    const int count = t.pixels(), padded = (count + 15) / 16 * 16;
    const int bordered = together * (rows + 2) * (width + 2) * INNER * 2, stage = bordered + padded * OUTER * 2;
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
    int tile = blockIdx.x, now = 0;
    if (tile < tiles) {
        fetch_with_border<INNER>(base, x, t, tile);
        fetch<OUTER>(base + bordered, dy, t, tile, padded);
    }
    copies_begun();
    for (; tile < tiles; tile += gridDim.x, now ^= 1) {
        if (tile + gridDim.x < tiles) {
            u32 next = base + (now ^ 1) * stage;
            fetch_with_border<INNER>(next, x, t, tile + gridDim.x);
            fetch<OUTER>(next + bordered, dy, t, tile + gridDim.x, padded);
        }
        copies_begun();
        copies_done<1>();
        __syncthreads();
        const u32 xs = base + now * stage, gs = xs + bordered;
        for (int first = 0; first < padded; first += 16) {
            u32 b[(PARTS + 1) / 2][4];
            const u32 gradients = gs + (first + lane % 16) * (OUTER * 2);
#pragma unroll
            for (int n = 0; n < (PARTS + 1) / 2; n++)
                transposed4(b[n], gradients + (2 * n + lane / 16 < PARTS ? 2 * n + lane / 16 : 2 * n) * 16);
            int p = first + lane % 8 + lane / 16 * 8;
            const u32 pixel = xs + t.place(p < count ? p : 0) * (INNER * 2);
#pragma unroll
            for (int m = 0; m < ROWS; m++) {
                u32 a[4];
                transposed4(a, pixel + offset[m]);
#pragma unroll
                for (int n = 0; n < PARTS; n++) multiply(total[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
            }
        }
        __syncthreads();  // before the next but one takes its place
    }
    float* to = partial + (long long)blockIdx.x * (OUTER * 9 * INNER);
#pragma unroll
    for (int m = 0; m < ROWS; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int q = 2 * (m * WARPS + warp) + half;
            if (q >= CHUNKS) continue;
            int k = q * 8 + lane / 4;
#pragma unroll
            for (int n = 0; n < PARTS; n++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    to[(n * 8 + lane % 4 * 2 + i) * (9 * INNER) + k] = total[m][n][2 * half + i];
        }
}
