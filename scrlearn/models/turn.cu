// Weights that are matrices, turned against orthogonalised directions, as orthogonal.py has it: sixteen launches for
// all of them in the place of hundreds, in float32 throughout.
//
// A direction is `own` times the gradient and `past` times the velocity. Squares are as high and wide as a matrix has
// rows; those of all matrices lie one behind the other. They are symmetric and commute, so that a product of two of them
// is made of their rows, and only the tiles at the diagonal and below it are computed.

constexpr int MOST = 64, SIDE = 32, THREADS = 256;  // as in cuda_turn.py; a tile of results is SIDE × SIDE
constexpr int GROUPS = 4, DEPTH = 16, WIDE = SIDE + 4;  // each group of threads adds up every fourth DEPTH terms

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

// Sums of left(i, k) · right(j, k) over k for all i and j of a tile. Each thread gets four of them: those of row
// threadIdx.x / 8, from column threadIdx.x % 8 · 4 on. ALONG: neighbours in memory have neighbouring j, not k.
template <bool ALONG, class Left, class Right>
__device__ __forceinline__ float4 product(float* held, int length, Left left, Right right) {
    const int thread = threadIdx.x % (THREADS / GROUPS), group = threadIdx.x / (THREADS / GROUPS);
    const int row = thread / 8 * 4, column = thread % 8 * 4;
    float* lefts = held + group * 2 * DEPTH * WIDE;
    float* rights = lefts + DEPTH * WIDE;
    float sum[4][4] = {};
    for (int all = 0; all < length; all += GROUPS * DEPTH) {
        const int begin = all + group * DEPTH;
        for (int n = thread; n < SIDE * DEPTH; n += THREADS / GROUPS) {
            const int i = n / DEPTH, k = n % DEPTH;
            lefts[k * WIDE + i] = begin + k < length ? left(i, begin + k) : 0.0f;
            const int j = ALONG ? n % SIDE : i, l = ALONG ? n / SIDE : k;
            rights[l * WIDE + j] = begin + l < length ? right(j, begin + l) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            const float4 x = *reinterpret_cast<const float4*>(lefts + k * WIDE + row);
            const float4 y = *reinterpret_cast<const float4*>(rights + k * WIDE + column);
            const float xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sum[i][j] += xs[i] * ys[j];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float4 four = {sum[i][0], sum[i][1], sum[i][2], sum[i][3]};
        *reinterpret_cast<float4*>(held + group * SIDE * SIDE + (row + i) * SIDE + column) = four;
    }
    __syncthreads();
    float4 whole = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const float4 part = *reinterpret_cast<const float4*>(held + g * SIDE * SIDE + 4 * threadIdx.x);
        whole = {whole.x + part.x, whole.y + part.y, whole.z + part.z, whole.w + part.w};
    }
    return whole;
}

// Writes a tile of a square, and its mirror image: `value(i, j, sum)` for the four sums of this thread.
template <class Value>
__device__ __forceinline__ void write(float* square, int rows, int top, int left, const float4& sums, Value value) {
    const int i = top + threadIdx.x / 8, begin = left + threadIdx.x % 8 * 4;
    const float four[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int j = begin + n;
        if (i < rows && j <= i) square[i * rows + j] = square[j * rows + i] = value(i, j, four[n]);
    }
}

struct Tile {
    int matrix, top, left;
};

__device__ __forceinline__ Tile tile_of_square(const Turned& t, int block) {
    const int matrix = whose(t.squares, t.count, block);
    int row = 0, column = block - t.squares[matrix];
    while (column > row) column -= ++row;
    return {matrix, row * SIDE, column * SIDE};
}

// square = D Dᵀ
__global__ void __launch_bounds__(THREADS) squares(const Turned t, float own, float past, float* square) {
    __shared__ float4 held[GROUPS * 2 * DEPTH * WIDE / 4];
    const Tile tile = tile_of_square(t, blockIdx.x);
    const int matrix = tile.matrix, top = tile.top, left = tile.left;
    const float *g = t.gradient[matrix], *v = t.velocity[matrix];
    const int rows = t.rows[matrix], columns = t.columns[matrix];
    const auto direction = [=](int i, int k) {
        if (i >= rows) return 0.0f;
        const int n = i * columns + k;
        return v ? own * g[n] + past * v[n] : own * g[n];
    };
    const float4 sums = product<false>(
        reinterpret_cast<float*>(held), columns, [=](int i, int k) { return direction(top + i, k); },
        [=](int j, int k) { return direction(left + j, k); });
    write(square + t.place[matrix], rows, top, left, sums, [](int, int, float sum) { return sum; });
}

// One product of a round. In the first round the squares are still to be divided by their traces, and `one` is the
// identity divided by the trace's root.
//   STEP 0: rest = b S + c S²
//   STEP 1: after = a one + rest one, and in the second half of the blocks, where there are any, once = a S + rest S
//   STEP 2: S = a once + rest once
template <int STEP>
__global__ void __launch_bounds__(THREADS) iterate(
    const Turned t, float* square, float* rest, float* once, const float* one, float* after, const Polynomial p,
    int blocks, int is_first) {
    __shared__ float4 held[GROUPS * 2 * DEPTH * WIDE / 4];
    const bool second = STEP == 1 && static_cast<int>(blockIdx.x) >= blocks;
    const Tile tile = tile_of_square(t, second ? blockIdx.x - blocks : blockIdx.x);
    const int top = tile.top, left = tile.left, rows = t.rows[tile.matrix], place = t.place[tile.matrix];
    float share = 1.0f;
    if (is_first && STEP < 2) {
        float trace = 0.0f;
        for (int i = 0; i < rows; i++) trace += square[place + i * (rows + 1)];
        share = 1.0f / fmaxf(trace, 1.17549435e-38f);
    }
    const auto times = [&](const float* x, float x_share, const float* y, float y_share) {
        return product<false>(
            reinterpret_cast<float*>(held), rows,
            [=](int i, int k) { return top + i < rows ? x_share * x[(top + i) * rows + k] : 0.0f; },
            [=](int j, int k) { return left + j < rows ? y_share * y[(left + j) * rows + k] : 0.0f; });
    };
    float *S = square + place, *R = rest + place, *B = once + place;
    if (STEP == 0) {
        const float4 sums = times(S, share, S, share);
        write(R, rows, top, left, sums,
              [=](int i, int j, float sum) { return p.b * (share * S[i * rows + j]) + p.c * sum; });
    } else if (STEP == 2) {
        const float4 sums = times(R, 1.0f, B, 1.0f);
        write(S, rows, top, left, sums, [=](int i, int j, float sum) { return p.a * B[i * rows + j] + sum; });
    } else if (second) {
        const float4 sums = times(R, 1.0f, S, share);
        write(B, rows, top, left, sums,
              [=](int i, int j, float sum) { return p.a * (share * S[i * rows + j]) + sum; });
    } else if (is_first) {
        const float root = sqrtf(share);
        const int i = top + threadIdx.x / 8;
        for (int j = left + threadIdx.x % 8 * 4, end = j + 4; j < end; j++)
            if (i < rows && j < rows)
                after[place + i * rows + j] = root * ((i == j ? p.a : 0.0f) + R[i * rows + j]);
        if (top != left)
            for (int j = left + threadIdx.x % 8 * 4, end = j + 4; j < end; j++)
                if (i < rows && j < rows) after[place + j * rows + i] = root * R[i * rows + j];
    } else {
        const float* Q = one + place;
        const float4 sums = times(R, 1.0f, Q, 1.0f);
        write(after + place, rows, top, left, sums,
              [=](int i, int j, float sum) { return p.a * Q[i * rows + j] + sum; });
    }
}

// W = keep W − step · length · one D
__global__ void __launch_bounds__(THREADS) turn(
    const Turned t, float own, float past, const float* one, const float* lengths, float keep) {
    __shared__ float4 held[GROUPS * 2 * DEPTH * WIDE / 4];
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
