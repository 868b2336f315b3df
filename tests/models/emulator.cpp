// Runs the CUDA kernels on a CPU. A block's threads take turns: each goes on until it waits for others, where a warp's
// lanes or all of them meet. Blocks run one after the other. With -DCONCURRENT they are threads of the system, so that a
// sanitizer can look for races (-fsanitize=thread); that takes ten times as long.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>
#ifdef CONCURRENT
#include <barrier>
#include <thread>
#else
#include <ucontext.h>
#endif

#define EMULATED
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __align__(bytes)
#define __launch_bounds__(...)

typedef unsigned int u32;
typedef unsigned short u16;
struct float4 {
    float x, y, z, w;
};
struct uint4 {
    u32 x, y, z, w;
};
struct Index {
    int x;
};

#ifdef CONCURRENT
static thread_local Index threadIdx, blockIdx;
struct Meeting {
    std::barrier<> barrier;
    Meeting(int, int wanted) : barrier(wanted) {}
    void arrive_and_wait() { barrier.arrive_and_wait(); }
};
#else
static Index threadIdx, blockIdx;
struct Turn {  // one of a block's threads, on a stack of its own
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool over = false;
};
static std::vector<Turn> turns;
static ucontext_t outside;
static const std::function<void()>* work;
constexpr std::size_t STACK = 64 * 1024;

static int next_turn(int first, int count, int after) {  // of those, the one after this that is not over; -1 if all are
    for (int i = 1; i <= count; i++)
        if (const int next = first + (after - first + i) % count; !turns[next].over) return next;
    return -1;
}

struct Meeting {  // so many threads from the first on
    int first, wanted, here = 0;
    u32 round = 0;
    Meeting(int first, int wanted) : first(first), wanted(wanted) {}
    void arrive_and_wait() {
        const u32 mine = round;
        const int self = threadIdx.x;
        if (++here == wanted) here = 0, round++;
        while (round == mine) {
            const int next = next_turn(first, wanted, self);
            if (next == self) std::abort();  // all others have gone without it
            threadIdx.x = next;
            swapcontext(&turns[self].context, &turns[next].context);
            threadIdx.x = self;
        }
    }
};

static void take_turn() {
    (*work)();
    turns[threadIdx.x].over = true;
    const int next = next_turn(0, static_cast<int>(turns.size()), threadIdx.x);
    if (next < 0) setcontext(&outside);
    threadIdx.x = next;
    setcontext(&turns[next].context);
}
#endif
static Index blockDim, gridDim;
alignas(16) unsigned char shared[232448];  // as much as a block can have
static int given_shared;

struct Warp {
    Meeting meet;
    u32 addresses[32], a[32][4], b[32][2];
    float values[32];
    explicit Warp(int first) : meet(first, 32) {}
};
static std::vector<std::unique_ptr<Warp>> warps;
static std::unique_ptr<Meeting> block;

static Warp& warp_of() { return *warps[threadIdx.x / 32]; }
static int lane_of() { return threadIdx.x % 32; }
static void __syncthreads() { block->arrive_and_wait(); }
static u32 shared_address(const void* pointer) { return static_cast<u32>(static_cast<const unsigned char*>(pointer) - shared); }

static void check(u32 address) {
    if (address % 16 || address + 16 > static_cast<u32>(given_shared)) std::abort();
}

// Copies arrive when they are waited for; until then there is not a number, as soon as they are asked for.
struct Copy {
    u32 to;
    const void* from;
    bool inside;
};
static std::vector<std::deque<std::vector<Copy>>> copies;  // each thread's own

static void copy16(u32 to, const void* from, bool inside) {
    check(to);
    std::memset(shared + to, 0xff, 16);
    copies[threadIdx.x].back().push_back({to, from, inside});
}
static void copies_begun() { copies[threadIdx.x].emplace_back(); }
template <int BEHIND>
static void copies_done() {
    auto& own = copies[threadIdx.x];
    for (; own.size() > BEHIND + 1; own.pop_front())
        for (const Copy& copy : own.front())
            copy.inside ? std::memcpy(shared + copy.to, copy.from, 16) : std::memset(shared + copy.to, 0, 16);
}

static float from_half(u16 half) {
    u32 bits = static_cast<u32>(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static u16 to_half(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<u16>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static void read(u32 (&r)[4], u32 from, bool transposed) {
    Warp& warp = warp_of();
    const int lane = lane_of();
    check(from);
    warp.addresses[lane] = from;
    warp.meet.arrive_and_wait();
    for (int i = 0; i < 4; i++) {
        u16 both[2];
        for (int j = 0; j < 2; j++) {
            int row = lane / 4, column = lane % 4 * 2 + j;
            if (transposed) std::swap(row, column);
            std::memcpy(&both[j], shared + warp.addresses[i * 8 + row] + column * 2, 2);
        }
        r[i] = both[0] | static_cast<u32>(both[1]) << 16;
    }
    warp.meet.arrive_and_wait();
}
static void matrices4(u32 (&r)[4], u32 from) { read(r, from, false); }
static void transposed4(u32 (&r)[4], u32 from) { read(r, from, true); }

static void read2(u32 (&r)[4], u32 from, bool transposed) {  // half of the lanes' addresses do not count
    u32 all[4];
    read(all, lane_of() < 16 ? from : 0, transposed);
    std::copy(all, all + 2, r);
}
static void matrices2(u32 (&r)[4], u32 from) { read2(r, from, false); }
static void transposed2(u32 (&r)[4], u32 from) { read2(r, from, true); }

static float part(u32 both, int which) { return from_half(static_cast<u16>(which ? both >> 16 : both)); }

static void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    Warp& warp = warp_of();
    const int lane = lane_of();
    std::memcpy(warp.a[lane], a, 16);
    warp.b[lane][0] = b0;
    warp.b[lane][1] = b1;
    warp.meet.arrive_and_wait();
    for (int i = 0; i < 4; i++) {
        const int m = lane / 4 + i / 2 * 8, n = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++)
            c[i] += part(warp.a[m % 8 * 4 + k % 8 / 2][m / 8 + k / 8 * 2], k % 2) * part(warp.b[n * 4 + k % 8 / 2][k / 8], k % 2);
    }
    warp.meet.arrive_and_wait();
}

static u32 pair(float low, float high) { return to_half(low) | static_cast<u32>(to_half(high)) << 16; }
static float low(u32 both) { return part(both, 0); }
static float high(u32 both) { return part(both, 1); }

static float __shfl_xor_sync(u32, float value, int other) {
    Warp& warp = warp_of();
    warp.values[lane_of()] = value;
    warp.meet.arrive_and_wait();
    value = warp.values[lane_of() ^ other];
    warp.meet.arrive_and_wait();
    return value;
}

static void __syncwarp() { warp_of().meet.arrive_and_wait(); }
static u32 __umulhi(u32 a, u32 b) { return static_cast<u32>(static_cast<std::uint64_t>(a) * b >> 32); }
static int min(int a, int b) { return std::min(a, b); }
static void __threadfence() {}
static int atomicAdd(int* where, int value) { return std::exchange(*where, *where + value); }
static float __ldcg(const float* from) { return *from; }
static float4 __ldcg(const float4* from) {
    if (reinterpret_cast<std::uintptr_t>(from) % 16) std::abort();
    return *from;
}

#include CONVOLUTION
#include STRIDED
#undef __shared__
#define __shared__ static
#include BATCH_NORM
namespace descent {
#include DESCENT
}
namespace turning {
#include TURN
}

// all threads of one block, from their beginning to their end
static void run(int threads, const std::function<void()>& function) {
#ifdef CONCURRENT
    std::vector<std::thread> running;
    for (int t = 0; t < threads; t++)
        running.emplace_back([&function, t, at = blockIdx] {
            threadIdx.x = t;
            blockIdx = at;
            function();
        });
    for (auto& thread : running) thread.join();
#else
    work = &function;
    turns.resize(threads);
    for (Turn& turn : turns) {
        if (!turn.stack) turn.stack.reset(new char[STACK]);
        turn.over = false;
        getcontext(&turn.context);
        turn.context.uc_stack.ss_sp = turn.stack.get();
        turn.context.uc_stack.ss_size = STACK;
        makecontext(&turn.context, take_turn, 0);
    }
    threadIdx.x = 0;
    swapcontext(&outside, &turns[0].context);
#endif
}

static void launch(int blocks, int threads, int bytes, const std::function<void()>& function) {
    gridDim.x = blocks;
    blockDim.x = threads;
    given_shared = bytes;
    for (int b = 0; b < blocks; b++) {
        warps.clear();
        for (int i = 0; i < threads / 32; i++) warps.push_back(std::make_unique<Warp>(i * 32));
        block = std::make_unique<Meeting>(0, threads);
        copies.assign(threads, std::deque<std::vector<Copy>>(1));
        std::memset(shared, 0xff, sizeof shared);  // not a number: what is read must have been written
        blockIdx.x = b;
        run(threads, function);
        for (int i = given_shared; i < static_cast<int>(sizeof shared); i++)
            if (shared[i] != 0xff) std::abort();  // written behind what a block was given
    }
}

template <int INNER, int OUTER>
static void convolve_(bool backward, bool with_sums, int blocks, int threads, int bytes, const u16* x, const float* w, u16* y, float* sums,
                      int apart, int images, int height, int width, int rows, int together, int tiles) {
    auto* chosen = backward ? (with_sums ? convolve<INNER, OUTER, true, true> : convolve<INNER, OUTER, true, false>)
                            : (with_sums ? convolve<INNER, OUTER, false, true> : convolve<INNER, OUTER, false, false>);
    launch(blocks, threads, bytes, [=] { chosen(x, w, y, sums, apart, images, height, width, rows, together, tiles); });
}

#define SIZES(DO) DO(24, 24) DO(24, 40) DO(40, 24) DO(40, 40) DO(8, 16) DO(16, 8) DO(8, 24) DO(24, 8)

extern "C" int run_convolve(int inner, int outer, int backward, int with_sums, int blocks, int threads, int bytes, const u16* x, const float* w,
                            u16* y, float* sums, int apart, int images, int height, int width, int rows, int together, int tiles) {
#define DO(A, B) \
    if (inner == A && outer == B) \
        return convolve_<A, B>(backward, with_sums, blocks, threads, bytes, x, w, y, sums, apart, images, height, width, rows, together, tiles), 0;
    SIZES(DO)
#undef DO
    return 1;
}

extern "C" int run_weight_gradient(int inner, int outer, int blocks, int threads, int bytes, const u16* x, const u16* dy, float* partial,
                                   int images, int height, int width, int rows, int together, int tiles) {
#define DO(A, B) \
    if (inner == A && outer == B) { \
        launch(blocks, threads, bytes, [=] { weight_gradient<A, B>(x, dy, partial, images, height, width, rows, together, tiles); }); \
        return 0; \
    }
    SIZES(DO)
#undef DO
    return 1;
}

template <int INNER, int OUTER>
static void downsample_(bool with_sums, int blocks, int threads, int bytes, const u16* x, const float* w, const float* w1, u16* y, u16* y1,
                        float* sums, int apart, int images, int height, int width, int rows, int together, int tiles) {
    auto* chosen = with_sums ? downsample<INNER, OUTER, true> : downsample<INNER, OUTER, false>;
    launch(blocks, threads, bytes, [=] { chosen(x, w, w1, y, y1, sums, apart, images, height, width, rows, together, tiles); });
}

#define STRIDED_SIZES(DO) DO(24, 40) DO(40, 80) DO(8, 16) DO(16, 8)

extern "C" int run_downsample(int inner, int outer, int with_sums, int blocks, int threads, int bytes, const u16* x, const float* w,
                              const float* w1, u16* y, u16* y1, float* sums, int apart, int images, int height, int width, int rows, int together,
                              int tiles) {
#define DO(A, B) \
    if (inner == A && outer == B) \
        return downsample_<A, B>(with_sums, blocks, threads, bytes, x, w, w1, y, y1, sums, apart, images, height, width, rows, together, tiles), 0;
    STRIDED_SIZES(DO)
#undef DO
    return 1;
}

extern "C" int run_downsample_back(int inner, int outer, int blocks, int threads, int bytes, const u16* dy, const u16* dy1, const float* w,
                                   const float* w1, u16* dx, int images, int height, int width, int rows, int together, int tiles) {
#define DO(A, B) \
    if (inner == A && outer == B) { \
        launch(blocks, threads, bytes, \
               [=] { downsample_back<A, B>(dy, dy1, w, w1, dx, images, height, width, rows, together, tiles); }); \
        return 0; \
    }
    STRIDED_SIZES(DO)
#undef DO
    return 1;
}

extern "C" int run_downsample_weights(int inner, int outer, int blocks, int threads, int bytes, const u16* x, const u16* dy, const u16* dy1,
                                      float* partial, int images, int height, int width, int rows, int together, int tiles) {
#define DO(A, B) \
    if (inner == A && outer == B) { \
        launch(blocks, threads, bytes, \
               [=] { downsample_weights<A, B>(x, dy, dy1, partial, images, height, width, rows, together, tiles); }); \
        return 0; \
    }
    STRIDED_SIZES(DO)
#undef DO
    return 1;
}

#define CHANNELS(DO) DO(8) DO(24) DO(80) DO(160)

extern "C" int run_statistics(int channels, int blocks, int threads, int bytes, const u16* x, float* partial, int* counter, const float* weight,
                              const float* bias, float* mean, float* var, float* saved, int rows, int segments, float momentum, float eps) {
#define DO(C) \
    if (channels == C) { \
        launch(blocks, threads, bytes, [=] { statistics<C>(x, partial, counter, weight, bias, mean, var, saved, rows, segments, momentum, eps); }); \
        return 0; \
    }
    CHANNELS(DO)
#undef DO
    return 1;
}

extern "C" int run_settle(int channels, int blocks, int threads, int bytes, const float* sums, int parts, const float* weight, const float* bias,
                          float* mean, float* var, float* saved, int rows, int segments, float momentum, float eps) {
#define DO(C) \
    if (channels == C) { \
        launch(blocks, threads, bytes, [=] { settle<C>(sums, parts, weight, bias, mean, var, saved, rows, segments, momentum, eps); }); \
        return 0; \
    }
    CHANNELS(DO)
#undef DO
    return 1;
}

template <int C, bool TWICE>
static auto* chosen_sums(bool shortcut, bool relu) {
    return shortcut ? (relu ? backward_sums<C, true, true, TWICE> : backward_sums<C, true, false, TWICE>)
                    : (relu ? backward_sums<C, false, true, TWICE> : backward_sums<C, false, false, TWICE>);
}

extern "C" int run_backward_sums(int channels, int shortcut, int relu, int twice, int blocks, int threads, int bytes, const u16* dy,
                                 const u16* also, const u16* y, const u16* x, u16* before, float* partial, int* counter, const float* saved,
                                 float* d_weight, float* d_bias, float* coefficients, int rows, int segments) {
#define DO(C) \
    if (channels == C) { \
        auto* chosen = twice ? chosen_sums<C, true>(shortcut, relu) : chosen_sums<C, false>(shortcut, relu); \
        launch(blocks, threads, bytes, \
               [=] { chosen(dy, also, y, x, before, partial, counter, saved, d_weight, d_bias, coefficients, rows, segments); }); \
        return 0; \
    }
    CHANNELS(DO)
#undef DO
    return 1;
}

extern "C" int run_descend(int blocks, int threads, int bytes, descent::Tensors tensors, const float* updates, float rate, float momentum,
                           float scale, float averaging) {
    launch(blocks, threads, bytes, [&] { descent::descend(tensors, updates, rate, momentum, scale, averaging); });
    return 0;
}

extern "C" int run_squares(int blocks, int threads, int bytes, turning::Turned matrices, float own, float past, float* square) {
    launch(blocks, threads, bytes, [&] { turning::squares(matrices, own, past, square); });
    return 0;
}

extern "C" int run_iterate(int blocks, int threads, int bytes, turning::Turned matrices, float* square, float* rest, float* once, float* one,
                           float* after, turning::Polynomial polynomial, int rounds) {
    launch(blocks, threads, bytes, [&] { turning::iterate(matrices, square, rest, once, one, after, polynomial, rounds); });
    return 0;
}

extern "C" int run_turn(int blocks, int threads, int bytes, turning::Turned matrices, float own, float past, const float* one,
                        const float* lengths, float keep) {
    launch(blocks, threads, bytes, [&] { turning::turn(matrices, own, past, one, lengths, keep); });
    return 0;
}
