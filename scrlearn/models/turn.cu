// Weights that are matrices, turned against orthogonalised directions, as orthogonal.py has it: three launches for all of
// them in the place of hundreds, in float32 throughout.
//
// A direction is `own` times the gradient and `past` times the velocity. Squares are as high and wide as a matrix has
// rows; those of all matrices lie one behind the other. They are symmetric and commute, so that a product of two of them
// is made of their rows, and only the tiles at the diagonal and below it are computed.

constexpr int MOST = 64, SIDE = 32, THREADS = 256;  // as in cuda_turn.py; a tile of results is SIDE × SIDE
constexpr int GROUPS = 4;                           // of threads: each adds up every fourth four terms
constexpr int PANEL = 160, PITCH = PANEL + 4;       // terms that are held at once
constexpr int HELD = 2 * SIDE * PITCH;
#ifdef EMULATED
constexpr int CLUSTER = 1;
#define IN_CLUSTERS
#else
constexpr int CLUSTER = 8;  // blocks that work on one matrix and can wait for each other
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#endif

struct Turned {  // a kernel's arguments have room for 4 KB
    float* weight[MOST];
    const float* gradient[MOST];
    const float* velocity[MOST];
    int rows[MOST], columns[MOST];
    int place[MOST];    // of its squares
    int squares[MOST];  // first block, where blocks compute tiles of squares
    int tiles[MOST];    // first block, where blocks compute tiles of matrices
    float step[MOST];   // its share of the length
    int count;
};

struct Polynomial {
    float a, b, c;
};

__device__ __forceinline__ int whose(const int* first, int count, int block) {
    int low = 0, high = count - 1;
    while (low < high) {  // the last matrix that begins at this block or before
        const int middle = (low + high + 1) / 2;
        if (first[middle] <= block) low = middle;
        else high = middle - 1;
    }
    return low;
}

__device__ __forceinline__ void all_blocks_meet() {
    __threadfence();
#ifdef EMULATED
    __syncthreads();
#else
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n" ::: "memory");
#endif
}

// Puts one side of a product into shared memory, a row for each of SIDE. ALONG: neighbours in memory are neighbouring
// rows, not neighbouring terms.
template <bool ALONG, class From>
__device__ __forceinline__ void hold(float* rows, int length, From from) {
    constexpr int WARPS = THREADS / 32, TIMES = PANEL * SIDE / THREADS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float got[TIMES];
#pragma unroll
    for (int n = 0; n < TIMES; n++) {
        const int row = ALONG ? lane : warp + n % (SIDE / WARPS) * WARPS;
        const int term = ALONG ? warp + n * WARPS : lane + n / (SIDE / WARPS) * 32;
        got[n] = term < length ? from(row, term) : 0.0f;
    }
#pragma unroll
    for (int n = 0; n < TIMES; n++) {
        const int row = ALONG ? lane : warp + n % (SIDE / WARPS) * WARPS;
        const int term = ALONG ? warp + n * WARPS : lane + n / (SIDE / WARPS) * 32;
        rows[row * PITCH + term] = got[n];
    }
}

// Sums of left(i, k) · right(j, k) over k for all i and j of a tile. Each thread gets four of them: those of row
// threadIdx.x / 8, from column threadIdx.x % 8 · 4 on.
template <bool ALONG, class Left, class Right>
__device__ __forceinline__ float4 product(float* held, int length, Left left, Right right) {
    const int thread = threadIdx.x % (THREADS / GROUPS), group = threadIdx.x / (THREADS / GROUPS);
    const int row = thread / 8, column = thread % 8;  // of every eight
    float* rights = held + SIDE * PITCH;
    float sum[4][4] = {};
    for (int begin = 0; begin < length; begin += PANEL) {
        const int here = min(PANEL, length - begin);
        hold<false>(held, here, [=](int i, int k) { return left(i, begin + k); });
        hold<ALONG>(rights, here, [=](int j, int k) { return right(j, begin + k); });
        __syncthreads();
        for (int k = 4 * group; k < here; k += 4 * GROUPS) {
            float4 x[4], y[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                x[n] = *reinterpret_cast<const float4*>(held + (row + 8 * n) * PITCH + k);
                y[n] = *reinterpret_cast<const float4*>(rights + (column + 8 * n) * PITCH + k);
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    sum[i][j] += x[i].x * y[j].x + x[i].y * y[j].y + x[i].z * y[j].z + x[i].w * y[j].w;
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            held[(group * SIDE + row + 8 * i) * SIDE + column + 8 * j] = sum[i][j];
    __syncthreads();
    float4 whole = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const float4 part = *reinterpret_cast<const float4*>(held + g * SIDE * SIDE + 4 * threadIdx.x);
        whole = {whole.x + part.x, whole.y + part.y, whole.z + part.z, whole.w + part.w};
    }
    __syncthreads();
    return whole;
}

struct Corner {
    int top, left;
};

__device__ __forceinline__ Corner corner_of(int tile) {
    int row = 0;
    while (tile > row) tile -= ++row;
    return {row * SIDE, tile * SIDE};
}

// Writes a tile of a square, and its mirror image: `value(i, j, sum)` for the four sums of this thread.
template <class Value>
__device__ __forceinline__ void write(float* square, int rows, Corner corner, const float4& sums, Value value) {
    const int i = corner.top + threadIdx.x / 8, begin = corner.left + threadIdx.x % 8 * 4;
    const float four[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int j = begin + n;
        if (i < rows && j <= i) square[i * rows + j] = square[j * rows + i] = value(i, j, four[n]);
    }
}

// square = D Dᵀ
__global__ void __launch_bounds__(THREADS) squares(const Turned t, float own, float past, float* square) {
    __shared__ float4 held[HELD / 4];
    const int matrix = whose(t.squares, t.count, blockIdx.x);
    const Corner corner = corner_of(blockIdx.x - t.squares[matrix]);
    const float *g = t.gradient[matrix], *v = t.velocity[matrix];
    const int rows = t.rows[matrix], columns = t.columns[matrix];
    const auto direction = [=](int i, int k) {
        if (i >= rows) return 0.0f;
        const int n = i * columns + k;
        return v ? own * g[n] + past * v[n] : own * g[n];
    };
    const float4 sums = product<false>(
        reinterpret_cast<float*>(held), columns, [=](int i, int k) { return direction(corner.top + i, k); },
        [=](int j, int k) { return direction(corner.left + j, k); });
    write(square + t.place[matrix], rows, corner, sums, [](int, int, float sum) { return sum; });
}

// All rounds: a cluster for each matrix, whose blocks share its tiles. With S = square / its trace and one = the identity
// divided by the trace's root, every round is
//   rest = b S + c S²,   one = a one + rest one,   S = (a + rest)² S
// in three stages, since a product needs all tiles of its factors. `one` and `after` take turns: what the last round
// writes is in `after` if the number of rounds is odd.
__global__ void IN_CLUSTERS __launch_bounds__(THREADS) iterate(
    const Turned t, float* square, float* rest, float* once, float* one, float* after, const Polynomial p, int rounds) {
    __shared__ float4 held4[HELD / 4];
    float* held = reinterpret_cast<float*>(held4);
    const int matrix = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
    const int rows = t.rows[matrix], place = t.place[matrix], high = (rows + SIDE - 1) / SIDE;
    const int tiles = high * (high + 1) / 2;
    float *S = square + place, *R = rest + place, *B = once + place, *Q = one + place, *next = after + place;
    float trace = 0.0f;
    for (int i = threadIdx.x % 32; i < rows; i += 32) trace += __ldcg(S + i * (rows + 1));
#pragma unroll
    for (int n = 16; n; n /= 2) trace += __shfl_xor_sync(0xffffffff, trace, n);
    const auto times = [=](Corner corner, const float* x, float x_share, const float* y, float y_share) {
        return product<false>(
            held, rows,
            [=](int i, int k) { return corner.top + i < rows ? x_share * __ldcg(x + (corner.top + i) * rows + k) : 0.0f; },
            [=](int j, int k) { return corner.left + j < rows ? y_share * __ldcg(y + (corner.left + j) * rows + k) : 0.0f; });
    };
    float share = 1.0f / fmaxf(trace, 1.17549435e-38f);  // S is divided when it is read for the first time
    for (int left = rounds - 1; left >= 0; left--) {
        for (int tile = rank; tile < tiles; tile += CLUSTER) {
            const Corner corner = corner_of(tile);
            const float4 sums = times(corner, S, share, S, share);
            write(R, rows, corner, sums, [=](int i, int j, float sum) {
                return p.b * (share * __ldcg(S + i * rows + j)) + p.c * sum;
            });
        }
        all_blocks_meet();
        for (int work = rank; work < (left ? 2 * tiles : tiles); work += CLUSTER) {
            const Corner corner = corner_of(work % tiles);
            if (work >= tiles) {
                const float4 sums = times(corner, R, 1.0f, S, share);
                write(B, rows, corner, sums, [=](int i, int j, float sum) {
                    return p.a * (share * __ldcg(S + i * rows + j)) + sum;
                });
            } else if (left == rounds - 1) {  // the identity: no product
                const float root = sqrtf(share);
                const float4 none = {0.0f, 0.0f, 0.0f, 0.0f};
                write(next, rows, corner, none, [=](int i, int j, float) {
                    return root * ((i == j ? p.a : 0.0f) + __ldcg(R + i * rows + j));
                });
            } else {
                const float4 sums = times(corner, R, 1.0f, Q, 1.0f);
                write(next, rows, corner, sums, [=](int i, int j, float sum) {
                    return p.a * __ldcg(Q + i * rows + j) + sum;
                });
            }
        }
        if (!left) return;
        all_blocks_meet();
        for (int tile = rank; tile < tiles; tile += CLUSTER) {
            const Corner corner = corner_of(tile);
            const float4 sums = times(corner, R, 1.0f, B, 1.0f);
            write(S, rows, corner, sums, [=](int i, int j, float sum) {
                return p.a * __ldcg(B + i * rows + j) + sum;
            });
        }
        all_blocks_meet();
        float* written = next;
        next = Q;
        Q = written;
        share = 1.0f;
    }
}

// W = keep W − step · length · one D
__global__ void __launch_bounds__(THREADS) turn(
    const Turned t, float own, float past, const float* one, const float* lengths, float keep) {
    __shared__ float4 held[HELD / 4];
    const int matrix = whose(t.tiles, t.count, blockIdx.x);
    const int rows = t.rows[matrix], columns = t.columns[matrix], high = (rows + SIDE - 1) / SIDE;
    const int top = (blockIdx.x - t.tiles[matrix]) % high * SIDE, left = (blockIdx.x - t.tiles[matrix]) / high * SIDE;
    const float *g = t.gradient[matrix], *v = t.velocity[matrix], *Q = one + t.place[matrix];
    const float4 sums = product<true>(
        reinterpret_cast<float*>(held), rows,
        [=](int i, int k) { return top + i < rows ? Q[(top + i) * rows + k] : 0.0f; },
        [=](int j, int k) {
            if (left + j >= columns) return 0.0f;
            const int n = k * columns + left + j;
            return v ? own * g[n] + past * v[n] : own * g[n];
        });
    const float four[4] = {sums.x, sums.y, sums.z, sums.w}, step = t.step[matrix] * lengths[matrix];
    const int i = top + threadIdx.x / 8;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int j = left + threadIdx.x % 8 * 4 + n;
        if (i < rows && j < columns) {
            float& w = t.weight[matrix][i * columns + j];
            w = keep * w - step * four[n];
        }
    }
}
