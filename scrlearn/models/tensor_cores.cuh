// What a warp asks of the tensor cores, and how memory comes near them: copies into shared memory that are not waited for
// at once, matrices of 8x8 bfloat16 from there (ldmatrix), and their products (mma); and sums that they make.

#include "bfloat16.cuh"

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

__device__ __forceinline__ void matrices2(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(from) : "memory");
}

__device__ __forceinline__ void transposed4(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ void transposed2(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(from) : "memory");
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

#ifndef TENSOR_CORES
#define TENSOR_CORES
// The sums of sixteen pixels' channels, and of their squares: the products of eight channels' values with themselves have
// the squares on their diagonal, and beside them come the same values times ones. Pixels are PITCH bytes apart.
template <int CHANNELS, int PITCH>
__device__ __forceinline__ void add_sums(float (&sum)[CHANNELS / 8][4], u32 pixels) {
    constexpr int PARTS = CHANNELS / 8;
    const int lane = threadIdx.x % 32;
    const u32 from = pixels + lane % 16 * PITCH, ones = 0x3f803f80;
#pragma unroll
    for (int part = 0; part < PARTS; part += 2) {
        u32 b[4];
        if (part + 1 < PARTS) transposed4(b, from + (part + lane / 16) * 16);
        else transposed2(b, from + part * 16);
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (part + i < PARTS) multiply(sum[part + i], {b[2 * i], ones, b[2 * i + 1], ones}, b[2 * i], b[2 * i + 1]);
    }
}

// a warp's sums of so many channels, and behind them those of the squares; added to what is there, or in its place
template <int CHANNELS>
__device__ __forceinline__ void gather(float* to, const float (&sum)[CHANNELS / 8][4], bool add) {
    const int lane = threadIdx.x % 32, row = lane / 4;
    auto put = [=](int at, float value) { to[at] = add ? to[at] + value : value; };
#pragma unroll
    for (int part = 0; part < CHANNELS / 8; part++) {
        if (lane < 4) {
            put(part * 8 + lane * 2, sum[part][2]);
            put(part * 8 + lane * 2 + 1, sum[part][3]);
        }
        if (lane % 4 == row / 2) put(CHANNELS + part * 8 + row, row % 2 ? sum[part][1] : sum[part][0]);
    }
}

// A warp's rows of a weights' gradient, every so many from the first on: a row is two of all chunks of eight input
// channels, a line of the result (output channel, tap, input channel) has all of them.
template <int ROWS, int PARTS>
__device__ __forceinline__ void put_rows(float* to, const float (&total)[ROWS][PARTS][4], int first, int every, int chunks) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < ROWS; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int q = 2 * (m * every + first) + half;
            if (q >= chunks) continue;
#pragma unroll
            for (int n = 0; n < PARTS; n++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    to[(n * 8 + lane % 4 * 2 + i) * (chunks * 8) + q * 8 + lane / 4] = total[m][n][2 * half + i];
        }
}
#endif
