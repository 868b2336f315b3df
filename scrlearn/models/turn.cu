// Weights that are matrices, turned against orthogonalised directions, as orthogonal.py has it: three launches for all of
// them in the place of hundreds, in float32 throughout.
//
// A direction is `own` times the gradient and `past` times the velocity. Squares are as high and wide as a matrix has
// rows; those of all matrices lie one behind the other. They are symmetric and commute, so that a product of two of them
// is made of their rows, and only the tiles at the diagonal and below it are computed.

constexpr int MOST = 64, SIDE = 32, THREADS = 256;  // as in cuda_turn.py; a tile of results is SIDE × SIDE
constexpr int GROUPS = 4;                           // of threads: each adds up every fourth four terms
constexpr int PANEL = 160, PITCH = PANEL + 4;       // terms that are held at once
constexpr int HELD = 2 * SIDE * PITCH, APART = SIDE + 8;
constexpr int WARPS = THREADS / 32, TIMES = PANEL * SIDE / THREADS;
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
#ifdef EMULATED
    __syncthreads();
#else
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n" ::: "memory");
#endif
}

// One side of a product: rows of a · x + b · y, SIDE of them from `top` on, with `length` terms; outside it is 0.
struct Side {
    const float *x, *y;
    float a, b;
    int top, rows, length, pitch;
};

// What a thread takes of it. ALONG: neighbours in memory are neighbouring rows, not neighbouring terms.
template <bool ALONG>
__device__ __forceinline__ int row_of(int n) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return ALONG ? lane : warp + n % (SIDE / WARPS) * WARPS;
}
template <bool ALONG>
__device__ __forceinline__ int term_of(int n) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return ALONG ? 4 * (warp + n / 4 * WARPS) + n % 4 : lane + n / (SIDE / WARPS) * 32;
}

// All at once, without a branch: loads must not wait for each other. BOTH: y counts too.
template <bool ALONG, bool BOTH>
__device__ __forceinline__ void fetch(float (&got)[TIMES], const Side& side, int begin) {
#pragma unroll
    for (int n = 0; n < TIMES; n++) {
        const int row = side.top + row_of<ALONG>(n), term = begin + term_of<ALONG>(n);
        const bool inside = row < side.rows && term < side.length;
        const int at = inside ? ALONG ? term * side.pitch + row : row * side.pitch + term : 0;
        float value = side.a * side.x[at];
        if (BOTH) value += side.b * side.y[at];
        got[n] = inside ? value : 0.0f;
    }
}

template <bool ALONG>
__device__ __forceinline__ void put(float* rows, const float (&got)[TIMES]) {
#pragma unroll
    for (int n = 0; n < TIMES; n += ALONG ? 4 : 1) {
        float* to = rows + row_of<ALONG>(n) * PITCH + term_of<ALONG>(n);
        if (ALONG) *reinterpret_cast<float4*>(to) = {got[n], got[n + 1], got[n + 2], got[n + 3]};
        else *to = got[n];
    }
}

// Sums of left(i, k) · right(j, k) over k for all i and j of a tile. Each thread gets four of them: those of row
// threadIdx.x / 8, from column threadIdx.x % 8 · 4 on.
template <bool ALONG, bool BOTH_LEFT, bool BOTH_RIGHT>
__device__ __forceinline__ float4 product(float* held, const Side& left, const Side& right) {
    const int thread = threadIdx.x % (THREADS / GROUPS), group = threadIdx.x / (THREADS / GROUPS);
    const int row = thread / 8, column = thread % 8;  // of every eight
    float* rights = held + SIDE * PITCH;
    float sum[4][4] = {};
    for (int begin = 0; begin < left.length; begin += PANEL) {
        const int here = min(PANEL, left.length - begin);
        float one[TIMES], other[TIMES];
        fetch<false, BOTH_LEFT>(one, left, begin);
        fetch<ALONG, BOTH_RIGHT>(other, right, begin);
        put<false>(held, one);
        put<ALONG>(rights, other);
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
                for (int j = 0; j < 4; j++) {
                    sum[i][j] = fmaf(x[i].x, y[j].x, sum[i][j]);
                    sum[i][j] = fmaf(x[i].y, y[j].y, sum[i][j]);
                    sum[i][j] = fmaf(x[i].z, y[j].z, sum[i][j]);
                    sum[i][j] = fmaf(x[i].w, y[j].w, sum[i][j]);
                }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) held[(group * SIDE + row + 8 * i) * APART + column + 8 * j] = sum[i][j];
    __syncthreads();
    float4 whole = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const float* from = held + (g * SIDE + threadIdx.x / 8) * APART + threadIdx.x % 8 * 4;
        const float4 part = *reinterpret_cast<const float4*>(from);
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
    if (!v) v = g, past = 0.0f;
    const Side above = {g, v, own, past, corner.top, rows, columns, columns};
    const Side beside = {g, v, own, past, corner.left, rows, columns, columns};
    const float4 sums = product<false, true, true>(reinterpret_cast<float*>(held), above, beside);
    write(square + t.place[matrix], rows, corner, sums, [](int, int, float sum) { return sum; });
}

// All rounds: a cluster for each matrix, whose blocks share its tiles. With S = square / its trace and one = the identity
// divided by the trace's root, every round is
//   rest = a + b S + c S²,   one = rest one,   S = rest² S
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
    for (int i = threadIdx.x % 32; i < rows; i += 32) trace += S[i * (rows + 1)];
#pragma unroll
    for (int n = 16; n; n /= 2) trace += __shfl_xor_sync(0xffffffff, trace, n);
    const auto times = [=](Corner corner, const float* x, float x_share, const float* y, float y_share) {
        const Side left = {x, x, x_share, 0.0f, corner.top, rows, rows, rows};
        const Side right = {y, y, y_share, 0.0f, corner.left, rows, rows, rows};
        return product<false, false, false>(held, left, right);
    };
    float share = 1.0f / fmaxf(trace, 1.17549435e-38f);  // S is divided when it is read for the first time
    for (int left = rounds - 1; left >= 0; left--) {
        for (int tile = rank; tile < tiles; tile += CLUSTER) {
            const Corner corner = corner_of(tile);
            const int last = rows * rows - 1;
            const int at = (corner.top + threadIdx.x / 8) * rows + corner.left + threadIdx.x % 8 * 4;
            float own[4];  // asked for before the product, so that nothing waits for it
#pragma unroll
            for (int n = 0; n < 4; n++) own[n] = p.b * (share * S[min(at + n, last)]);
            const float4 sums = times(corner, S, share, S, share);
            const float4 both = {
                own[0] + p.c * sums.x, own[1] + p.c * sums.y, own[2] + p.c * sums.z, own[3] + p.c * sums.w};
            write(R, rows, corner, both, [=](int i, int j, float value) { return i == j ? p.a + value : value; });
        }
        all_blocks_meet();
        for (int work = rank; work < (left ? 2 * tiles : tiles); work += CLUSTER) {
            const bool second = work >= tiles;
            const Corner corner = corner_of(second ? work - tiles : work);
            const auto whole = [](int, int, float sum) { return sum; };
            if (!second && left == rounds - 1) {  // the identity: no product
                const float root = sqrtf(share);
                const float4 none = {0.0f, 0.0f, 0.0f, 0.0f};
                write(next, rows, corner, none, [=](int i, int j, float) { return root * R[i * rows + j]; });
            } else {
                const float4 sums = times(corner, R, 1.0f, second ? S : Q, second ? share : 1.0f);
                write(second ? B : next, rows, corner, sums, whole);
            }
        }
        if (!left) return;
        all_blocks_meet();
        for (int tile = rank; tile < tiles; tile += CLUSTER) {
            const Corner corner = corner_of(tile);
            const float4 sums = times(corner, R, 1.0f, B, 1.0f);
            write(S, rows, corner, sums, [](int, int, float sum) { return sum; });
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
    if (!v) v = g, past = 0.0f;
    const Side polynomial = {Q, Q, 1.0f, 0.0f, top, rows, rows, rows};
    const Side direction = {g, v, own, past, left, columns, rows, columns};  // its columns
    const float4 sums = product<true, false, true>(reinterpret_cast<float*>(held), polynomial, direction);
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
