// Two bfloat16 in a word, and what they are as float32.

typedef unsigned int u32;
typedef unsigned short u16;

#ifndef EMULATED
__device__ __forceinline__ u32 pair(float low, float high) {  // rounded to nearest
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float low(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(u32 both) { return __uint_as_float(both & 0xffff0000u); }
#endif
