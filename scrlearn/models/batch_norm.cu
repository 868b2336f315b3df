// What BatchNorm needs to know of a batch: its mean and variance, and on the way back the sums of its gradients.
//
// Images are bfloat16 with channels last, CHANNELS a multiple of 8. A thread reads chunks of eight channels, always the
// same ones. Every block leaves its sums; the block that finishes last adds them up, always in the same order, and
// works out what follows from them. A batch is `segments` runs of `rows` pixels, each with statistics of its own; each
// has as many blocks, one run after the other.

#include "bfloat16.cuh"

// What a thread has under way: pixels, and sums of blocks. The kernels' bounds leave it the registers; without them the
// compiler saves registers and waits for one load after the other.
constexpr int THREADS = 256, AT_ONCE = 4, PARTS_AT_ONCE = 16;

__device__ __forceinline__ void unpack(float (&values)[8], const uint4& chunk) {
    const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        values[2 * i] = low(words[i]);
        values[2 * i + 1] = high(words[i]);
    }
}

// The values as bfloat16 has them, and they themselves rounded so.
__device__ __forceinline__ uint4 packed(float (&values)[8]) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        words[i] = pair(values[2 * i], values[2 * i + 1]);
        values[2 * i] = low(words[i]);
        values[2 * i + 1] = high(words[i]);
    }
    return {words[0], words[1], words[2], words[3]};
}

// Sums of the block's threads for the same channels, into partial[block][2][CHANNELS].
template <int CHANNELS>
__device__ __forceinline__ void add_up_block(float* shared, const float (&first)[8], const float (&second)[8], float* partial) {
    constexpr int CHUNKS = CHANNELS / 8, LANES = THREADS / CHUNKS, USED = LANES * CHUNKS;
    constexpr int SHARES = 2 * CHANNELS <= THREADS ? THREADS / (2 * CHANNELS) : 1;  // threads for one sum
    const int thread = threadIdx.x;
    if (thread < USED)
#pragma unroll
        for (int i = 0; i < 8; i++) {  // lane, then which sum, then channel
            shared[thread / CHUNKS * 2 * CHANNELS + thread % CHUNKS * 8 + i] = first[i];
            shared[(thread / CHUNKS * 2 + 1) * CHANNELS + thread % CHUNKS * 8 + i] = second[i];
        }
    __syncthreads();
    for (int i = thread; i < SHARES * 2 * CHANNELS; i += THREADS) {
        const int share = i / (2 * CHANNELS), which = i - share * 2 * CHANNELS;
        float total = 0.0f;
        for (int lane = share; lane < LANES; lane += SHARES) total += shared[lane * 2 * CHANNELS + which];
        shared[share * 2 * CHANNELS + which] = total;  // its own first term, which nobody else reads
    }
    __syncthreads();
    for (int i = thread; i < 2 * CHANNELS; i += THREADS) {
        float total = 0.0f;
        for (int share = 0; share < SHARES; share++) total += shared[share * 2 * CHANNELS + i];
        partial[blockIdx.x * 2 * CHANNELS + i] = total;
    }
}

// Whether this block is the last to come here; then it sees what all others have written. Counts from 0 again.
__device__ __forceinline__ bool last_block(int* counter, int* told) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        *told = atomicAdd(counter, 1) == static_cast<int>(gridDim.x) - 1;
        if (*told) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return *told;
}

// Over all parts: shared[0 .. 2 * WIDTH) become the sums for the channels from `begin` on.
template <int CHANNELS, int WIDTH>
__device__ __forceinline__ void add_up_parts(float* shared, const float* parts, int count, int begin) {
    constexpr int SUMS = 2 * WIDTH, FOURS = SUMS / 4, SHARES = FOURS <= THREADS ? THREADS / FOURS : 1;  // threads for four sums
    for (int i = threadIdx.x; i < SHARES * FOURS; i += THREADS) {
        const int share = i / FOURS, which = i % FOURS * 4;
        const float* from = parts + which / WIDTH * CHANNELS + begin + which % WIDTH;
        float total[4] = {};
        for (int part = share; part < count; part += PARTS_AT_ONCE * SHARES) {
            float4 own[PARTS_AT_ONCE];
#pragma unroll
            for (int j = 0; j < PARTS_AT_ONCE; j++) {
                const int at = part + j * SHARES;
                own[j] = at < count ? __ldcg(reinterpret_cast<const float4*>(from + at * 2 * CHANNELS)) : float4{0, 0, 0, 0};
            }
#pragma unroll
            for (int j = 0; j < PARTS_AT_ONCE; j++) {
                total[0] += own[j].x;
                total[1] += own[j].y;
                total[2] += own[j].z;
                total[3] += own[j].w;
            }
        }
#pragma unroll
        for (int j = 0; j < 4; j++) shared[share * SUMS + which + j] = total[j];
    }
    __syncthreads();
    float totals[(SUMS + THREADS - 1) / THREADS];
    for (int i = threadIdx.x, j = 0; i < SUMS; i += THREADS, j++) {
        totals[j] = 0.0f;
        for (int share = 0; share < SHARES; share++) totals[j] += shared[share * SUMS + i];
    }
    __syncthreads();
    for (int i = threadIdx.x, j = 0; i < SUMS; i += THREADS, j++) shared[i] = totals[j];
    __syncthreads();
}

// saved: mean, 1 / deviation, scale, shift
template <int CHANNELS>
__device__ __forceinline__ void settle_channel(
    int c, float sum, float square, const float* weight, const float* bias, float* running_mean, float* running_var,
    float* saved, int rows, float momentum, float eps) {
    const float mean = sum / rows, variance = fmaxf(square / rows - mean * mean, 0.0f);
    const float inverse = 1.0f / sqrtf(variance + eps), scale = weight[c] * inverse;
    saved[c] = mean;
    saved[CHANNELS + c] = inverse;
    saved[2 * CHANNELS + c] = scale;
    saved[3 * CHANNELS + c] = bias[c] - mean * scale;
    const float unbiased = variance * rows / (rows - 1);
    running_mean[c] += momentum * (mean - running_mean[c]);
    running_var[c] += momentum * (unbiased - running_var[c]);
}

template <int CHANNELS>
__global__ void __launch_bounds__(THREADS, 2) statistics(
    const u16* __restrict__ x, float* __restrict__ partial, int* __restrict__ counter, const float* __restrict__ weight,
    const float* __restrict__ bias, float* __restrict__ running_mean, float* __restrict__ running_var,
    float* __restrict__ saved, int rows, int segments, float momentum, float eps) {
    constexpr int CHUNKS = CHANNELS / 8, LANES = THREADS / CHUNKS;
    __shared__ float shared[LANES * 2 * CHANNELS > 4 * THREADS ? LANES * 2 * CHANNELS : 4 * THREADS];
    __shared__ int told;
    const int lane = threadIdx.x / CHUNKS, blocks = gridDim.x / segments, segment = blockIdx.x / blocks;
    const uint4* from = reinterpret_cast<const uint4*>(x) + (long long)segment * rows * CHUNKS + threadIdx.x % CHUNKS;
    const int stride = blocks * LANES;
    float sum[8] = {}, square[8] = {};
    if (lane < LANES)
        for (int row = (blockIdx.x - segment * blocks) * LANES + lane; row < rows; row += AT_ONCE * stride) {
            uint4 chunk[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                chunk[i] = row + i * stride < rows ? from[(long long)(row + i * stride) * CHUNKS] : uint4{0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) {
                float value[8];
                unpack(value, chunk[i]);
#pragma unroll
                for (int c = 0; c < 8; c++) {
                    sum[c] += value[c];
                    square[c] += value[c] * value[c];
                }
            }
        }
    add_up_block<CHANNELS>(shared, sum, square, partial);
    if (!last_block(counter, &told)) return;
    for (int s = 0; s < segments; s++) {  // the running statistics move in this order
        add_up_parts<CHANNELS, CHANNELS>(shared, partial + s * blocks * 2 * CHANNELS, blocks, 0);
        for (int c = threadIdx.x; c < CHANNELS; c += THREADS)
            settle_channel<CHANNELS>(c, shared[c], shared[CHANNELS + c], weight, bias, running_mean, running_var,
                                     saved + s * 4 * CHANNELS, rows, momentum, eps);
        __syncthreads();
    }
}

// The same from sums that a convolution has made, `parts` for each segment; a block for eight channels.
template <int CHANNELS>
__global__ void __launch_bounds__(THREADS, 2) settle(
    const float* __restrict__ sums, int parts, const float* __restrict__ weight, const float* __restrict__ bias,
    float* __restrict__ running_mean, float* __restrict__ running_var, float* __restrict__ saved, int rows, int segments, float momentum,
    float eps) {
    __shared__ float shared[4 * THREADS];
    const int begin = blockIdx.x * 8, c = begin + threadIdx.x;
    for (int s = 0; s < segments; s++) {
        add_up_parts<CHANNELS, 8>(shared, sums + s * parts * 2 * CHANNELS, parts, begin);
        if (threadIdx.x < 8)
            settle_channel<CHANNELS>(c, shared[threadIdx.x], shared[8 + threadIdx.x], weight, bias, running_mean, running_var,
                                     saved + s * 4 * CHANNELS, rows, momentum, eps);
        __syncthreads();
    }
}

// Sums of the gradient before ReLU, g, and of g * (x - mean); from them the gradients of weight and bias and what the
// input's gradient needs: dx = scale * g + b * x + c. With a shortcut ReLU's sign is read from y, else worked out; and g,
// which is the shortcut's gradient too, is written to `before`, so that what y, dy and also say is read once.
// TWICE: the result had two readers, and the gradient is the sum of dy and also.
template <int CHANNELS, bool SHORTCUT, bool RELU, bool TWICE>
__global__ void __launch_bounds__(THREADS, 2) backward_sums(
    const u16* __restrict__ dy, const u16* __restrict__ also, const u16* __restrict__ y, const u16* __restrict__ x,
    u16* __restrict__ before, float* __restrict__ partial, int* __restrict__ counter, const float* __restrict__ saved, float* __restrict__ d_weight,
    float* __restrict__ d_bias, float* __restrict__ coefficients, int rows, int segments) {
    constexpr int CHUNKS = CHANNELS / 8, LANES = THREADS / CHUNKS;
    __shared__ float shared[LANES * 2 * CHANNELS > 4 * THREADS ? LANES * 2 * CHANNELS : 4 * THREADS];
    __shared__ int told;
    const int lane = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS, blocks = gridDim.x / segments, segment = blockIdx.x / blocks;
    const long long first = (long long)segment * rows * CHUNKS + chunk;
    const uint4 *gradients = reinterpret_cast<const uint4*>(dy) + first, *inputs = reinterpret_cast<const uint4*>(x) + first;
    const uint4 *outputs = reinterpret_cast<const uint4*>(y) + first, *others = reinterpret_cast<const uint4*>(also) + first;
    uint4* told_on = reinterpret_cast<uint4*>(before) + first;
    const int stride = blocks * LANES;
    float mean[8], scale[8], shift[8], sum[8] = {}, product[8] = {};
    const float* own = saved + segment * 4 * CHANNELS + chunk * 8;
#pragma unroll
    for (int c = 0; c < 8; c++) {
        mean[c] = own[c];
        scale[c] = own[2 * CHANNELS + c];
        shift[c] = own[3 * CHANNELS + c];
    }
    constexpr int TURNS = CHANNELS < 80 ? AT_ONCE / 2 : AT_ONCE;  // two to four images each; of many channels there are few rows
    if (lane < LANES)
        for (int row = (blockIdx.x - segment * blocks) * LANES + lane; row < rows; row += TURNS * stride) {
            uint4 g[TURNS], a[TURNS], v[TURNS], o[TURNS];
#pragma unroll
            for (int i = 0; i < TURNS; i++) {
                const long long at = (long long)(row + i * stride) * CHUNKS;
                const bool inside = row + i * stride < rows;
                g[i] = inside ? gradients[at] : uint4{0, 0, 0, 0};
                if (TWICE) a[i] = inside ? others[at] : uint4{0, 0, 0, 0};
                v[i] = inside ? inputs[at] : uint4{0, 0, 0, 0};
                if (RELU && SHORTCUT) o[i] = inside ? outputs[at] : uint4{0, 0, 0, 0};
            }
#pragma unroll
            for (int i = 0; i < TURNS; i++) {
                float gradient[8], other[8], value[8], sign[8];
                unpack(gradient, g[i]);
                if (TWICE) unpack(other, a[i]);
                unpack(value, v[i]);
                if (RELU && SHORTCUT) unpack(sign, o[i]);
#pragma unroll
                for (int c = 0; c < 8; c++) {
                    if (TWICE) gradient[c] += other[c];
                    if (RELU && (SHORTCUT ? sign[c] : value[c] * scale[c] + shift[c]) <= 0.0f) gradient[c] = 0.0f;
                }
                if (SHORTCUT) {
                    const uint4 rounded = packed(gradient);
                    if (row + i * stride < rows) told_on[(long long)(row + i * stride) * CHUNKS] = rounded;
                }
#pragma unroll
                for (int c = 0; c < 8; c++) {
                    sum[c] += gradient[c];
                    product[c] += gradient[c] * (value[c] - mean[c]);
                }
            }
        }
    add_up_block<CHANNELS>(shared, sum, product, partial);
    if (!last_block(counter, &told)) return;
    for (int s = 0; s < segments; s++, saved += 4 * CHANNELS, coefficients += 2 * CHANNELS) {
        add_up_parts<CHANNELS, CHANNELS>(shared, partial + s * blocks * 2 * CHANNELS, blocks, 0);
        for (int c = threadIdx.x; c < CHANNELS; c += THREADS) {
            const float inverse = saved[CHANNELS + c], total = shared[c], slope = shared[CHANNELS + c] * inverse;
            const float b = -saved[2 * CHANNELS + c] * inverse * slope / rows;
            d_bias[c] = s ? d_bias[c] + total : total;
            d_weight[c] = s ? d_weight[c] + slope : slope;
            coefficients[c] = b;
            coefficients[CHANNELS + c] = -saved[2 * CHANNELS + c] * total / rows - b * saved[c];
        }
        __syncthreads();
    }
}
