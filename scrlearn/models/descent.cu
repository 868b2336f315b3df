// One step of gradient descent for many weights, and of their running averages: a kernel in the place of a dozen.
//
// Every tensor lies in one piece, and all that belong to one weight lie in the same order. A block takes CHUNK values of
// one tensor. What is not wanted is null: without a gradient only the average moves.

constexpr int MOST = 80, THREADS = 256, CHUNK = 2048;  // as in cuda_descent.py

struct Tensors {  // a kernel's arguments have room for 4 KB
    float* weight[MOST];
    const float* gradient[MOST];
    float* velocity[MOST];
    float* average[MOST];
    int size[MOST];
    int first[MOST];  // block
    float decay[MOST];
    int count;
};

struct Rule {
    float rate, momentum, scale, share, decay;
    bool moves, has_velocity, has_average;
};

__device__ __forceinline__ void move(float& w, float g, float& v, float& a, const Rule& rule) {
    if (rule.moves) {
        g = (g + rule.decay * w) * rule.scale;
        if (rule.has_velocity) g = v = rule.momentum * v + g;
        w -= rule.rate * g;
    }
    if (rule.has_average) a += rule.share * (w - a);
}

// `updates` counts the averages' updates, this one too; their decay rises to `averaging`.
__global__ void __launch_bounds__(THREADS) descend(
    const Tensors t, const float* updates, float rate, float momentum, float scale, float averaging) {
    int low = 0, high = t.count - 1;
    while (low < high) {  // the last tensor that begins at this block or before
        const int middle = (low + high + 1) / 2;
        if (t.first[middle] <= blockIdx.x) low = middle;
        else high = middle - 1;
    }
    float *w = t.weight[low], *v = t.velocity[low], *a = t.average[low];
    const float* g = t.gradient[low];
    const int begin = (blockIdx.x - t.first[low]) * CHUNK, end = min(begin + CHUNK, t.size[low]);
    Rule rule = {rate, momentum, scale, 0.0f, t.decay[low], g != nullptr, v != nullptr, a != nullptr};
    if (a) rule.share = 1.0f - fminf((1.0f + *updates) / (10.0f + *updates), averaging);
    for (int i = begin + 4 * threadIdx.x; i < end; i += 4 * THREADS) {
        if (i + 4 <= end) {
            const float4 none = {0.0f, 0.0f, 0.0f, 0.0f};
            float4 weight = *reinterpret_cast<float4*>(w + i);
            const float4 gradient = g ? *reinterpret_cast<const float4*>(g + i) : none;
            float4 velocity = v ? *reinterpret_cast<float4*>(v + i) : none;
            float4 average = a ? *reinterpret_cast<float4*>(a + i) : none;
            move(weight.x, gradient.x, velocity.x, average.x, rule);
            move(weight.y, gradient.y, velocity.y, average.y, rule);
            move(weight.z, gradient.z, velocity.z, average.z, rule);
            move(weight.w, gradient.w, velocity.w, average.w, rule);
            if (g) *reinterpret_cast<float4*>(w + i) = weight;
            if (v) *reinterpret_cast<float4*>(v + i) = velocity;
            if (a) *reinterpret_cast<float4*>(a + i) = average;
        } else {
            for (int j = i; j < end; j++) {
                float velocity = v ? v[j] : 0.0f, average = a ? a[j] : 0.0f;
                move(w[j], g ? g[j] : 0.0f, velocity, average, rule);
                if (v) v[j] = velocity;
                if (a) a[j] = average;
            }
        }
    }
}
