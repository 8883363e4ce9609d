/* One training run of the table policy after another, on one thread: the same task, batch, losses and optimizer
 * as the package, written by hand. A yardstick for `benchmarks.throughput`; its random numbers are its own.
 *
 * Usage: training_run RUNS METHOD(0 grpo, 1 rs-sft) ITERATIONS GROUPS GROUP_SIZE EPOCHS
 * Prints seconds and the mean training success rate of the last ten iterations.
 * With METHOD 2 it only draws the random numbers that a grpo run needs.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { STEPS = 6, VARIANTS = 4, ACTIONS = 6, STATES = STEPS * VARIANTS, MAX_EPISODES = 4096 };
enum { READ, FIX_LOW, FIX_HIGH, UNDO_LOW, TEST, FINISH };

static const float LR = 0.08f, CLIP = 0.2f, BETA = 0.02f, LOG_UNIFORM = -1.791759469f;

typedef float Table[STATES][ACTIONS];

typedef struct {
    uint8_t length, success, state[STEPS], action[STEPS];
} Episode;

/* splitmix64: one multiplication chain per draw, 24 bits of it used. */
static uint64_t generator;
static inline float uniform(void) {
    uint64_t z = (generator += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (float)((z ^ (z >> 31)) >> 40) * 0x1p-24f;
}

/* variant = 2 * low_fixed + high_fixed */
static inline int next_variant(int variant, int action) {
    switch (action) {
        case FIX_LOW: return variant | 2;
        case FIX_HIGH: return variant | 1;
        case UNDO_LOW: return variant & 1;
        default: return variant;
    }
}

static void log_softmax(const float *logits, float *log_probs, float *probs) {
    float highest = logits[0], sum = 0;
    for (int a = 1; a < ACTIONS; a++) highest = fmaxf(highest, logits[a]);
    for (int a = 0; a < ACTIONS; a++) sum += probs[a] = expf(logits[a] - highest);
    float log_sum = highest + logf(sum), scale = 1 / sum;
    for (int a = 0; a < ACTIONS; a++) {
        log_probs[a] = logits[a] - log_sum;
        probs[a] *= scale;
    }
}

static Episode play(Table cumulative) {
    Episode episode = {0};
    for (int step = 0, variant = 0; step < STEPS; step++) {
        int state = step * VARIANTS + variant, action = 0;
        float u = uniform();
        for (int a = 0; a < ACTIONS - 1; a++) action += u >= cumulative[state][a];
        episode.state[step] = (uint8_t)state;
        episode.action[step] = (uint8_t)action;
        episode.length = (uint8_t)(step + 1);
        if (action == FINISH) {
            episode.success = variant == 3;
            break;
        }
        variant = next_variant(variant, action);
    }
    return episode;
}

static double run(uint64_t seed, int method, int iterations, int groups, int size, int epochs) {
    static Episode batch[MAX_EPISODES];
    Table logits = {{0}}, first = {{0}}, second = {{0}};
    int episodes = groups * size, step = 0;
    double late_success = 0, decay1 = 1, decay2 = 1;
    generator = seed * 0xD1342543DE82EF95u + 1;
    for (int iteration = 0; iteration < iterations; iteration++) {
        Table behavior, probs, cumulative, plus = {{0}}, minus = {{0}};
        float visits[STATES] = {0};
        for (int s = 0; s < STATES; s++) {
            log_softmax(logits[s], behavior[s], probs[s]);
            float below = 0;
            for (int a = 0; a < ACTIONS; a++) cumulative[s][a] = below += probs[s][a];
        }
        int retained = 0;
        for (int e = 0; e < episodes; e++) retained += (batch[e] = play(cumulative)).success;
        if (iteration >= iterations - 10) late_success += (double)retained / episodes / 10;
        if (method == 1 && retained == 0) continue;
        for (int g = 0; g < groups; g++) {
            Episode *group = batch + g * size;
            int successes = 0;
            for (int e = 0; e < size; e++) successes += group[e].success;
            int failures = size - successes, mixed = successes && failures;
            float odds = mixed ? sqrtf((float)failures / (float)successes) : 0;
            for (int e = 0; e < size; e++) {
                float share = 1.0f / (float)(group[e].length * episodes), weight;
                if (method == 1) weight = group[e].success ? share * (float)episodes / (float)retained : 0;
                else weight = !mixed ? 0 : group[e].success ? share * odds : -share / odds;
                for (int i = 0; i < group[e].length; i++) {
                    int s = group[e].state[i], a = group[e].action[i];
                    visits[s] += share;
                    if (weight > 0) plus[s][a] += weight;
                    else minus[s][a] += weight;
                }
            }
        }
        for (int epoch = 0; epoch < epochs; epoch++) {
            Table gradient;
            float squares = 0;
            for (int s = 0; s < STATES; s++) {
                if (visits[s] == 0) {
                    memset(gradient[s], 0, sizeof gradient[s]);
                    continue;
                }
                float log_probs[ACTIONS], p[ACTIONS], by_log_prob[ACTIONS], sum = 0;
                log_softmax(logits[s], log_probs, p);
                for (int a = 0; a < ACTIONS; a++) {
                    float g;
                    if (method == 1) g = -plus[s][a];
                    else {
                        float ratio = expf(log_probs[a] - behavior[s][a]);
                        g = -ratio * ((ratio < 1 + CLIP ? plus[s][a] : 0) + (ratio > 1 - CLIP ? minus[s][a] : 0));
                        g += BETA * visits[s] * p[a] * (log_probs[a] - LOG_UNIFORM + 1);
                    }
                    sum += by_log_prob[a] = g;
                }
                for (int a = 0; a < ACTIONS; a++) {
                    gradient[s][a] = by_log_prob[a] - p[a] * sum;
                    squares += gradient[s][a] * gradient[s][a];
                }
            }
            float scale = fminf(1, 1 / (sqrtf(squares) + 1e-6f));
            decay1 *= 0.9, decay2 *= 0.999, step++;
            float correct1 = (float)(1 / (1 - decay1)), correct2 = (float)(1 / (1 - decay2));
            float *x = *logits, *m = *first, *v = *second, *g = *gradient;
            for (int i = 0; i < STATES * ACTIONS; i++) {
                float d = g[i] * scale;
                m[i] = 0.9f * m[i] + 0.1f * d;
                v[i] = 0.999f * v[i] + 0.001f * d * d;
                x[i] -= LR * m[i] * correct1 / (sqrtf(v[i] * correct2) + 1e-8f);
            }
        }
    }
    return late_success;
}

static double draw(uint64_t seed, int iterations, int episodes) {
    float sum = 0;
    generator = seed;
    for (int i = 0; i < iterations * episodes * STEPS; i++) sum += uniform();
    return sum;
}

int main(int count, char **words) {
    int values[6] = {512, 0, 100, 4, 8, 2};
    for (int i = 1; i < count && i <= 6; i++) values[i - 1] = atoi(words[i]);
    int runs = values[0], method = values[1], iterations = values[2], episodes = values[3] * values[4];
    if (runs < 1 || episodes < 1 || episodes > MAX_EPISODES) return 2;
    struct timespec start, end;
    double result = 0;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < runs; i++)
        result += method == 2 ? draw((uint64_t)i, iterations, episodes)
                              : run((uint64_t)i, method, iterations, values[3], values[4], values[5]);
    clock_gettime(CLOCK_MONOTONIC, &end);
    double seconds = (double)(end.tv_sec - start.tv_sec) + (double)(end.tv_nsec - start.tv_nsec) * 1e-9;
    printf("%.9f %.6f\n", seconds, result / runs);
    return 0;
}
