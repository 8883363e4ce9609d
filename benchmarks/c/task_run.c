/* One training run of the table policy on a task whose tables are data, after another, on one thread: the same batch,
 * loss and optimizer as the package's grpo by default. A yardstick for `benchmarks.any_task`; its random numbers are its
 * own. For tasks without chance, whose checks are sure.
 *
 * Usage: task_run TABLES RUNS ITERATIONS GROUPS GROUP_SIZE EPOCHS
 * TABLES holds int32: steps, rows, views, actions, instances, outcomes; then next_row [step, row, action], submission of
 * the same shape, view [step, row + 1], start_row [instance], accepted [outcome, instance]. All instances are played.
 * Prints seconds and the mean training success rate of the last ten iterations.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const float LR = 0.08f, CLIP = 0.2f, BETA = 0.02f;

static int steps, rows, views, actions, instances, outcomes;
static int32_t *next_row, *submission, *view, *start_row, *accepted;

/* splitmix64: one multiplication chain per draw, 24 bits of it used. */
static uint64_t generator;
static inline uint64_t bits(void) {
    uint64_t z = (generator += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}
static inline float uniform(void) { return (float)(bits() >> 40) * 0x1p-24f; }

static void log_softmax(const float *logits, float *log_probs, float *probs) {
    float highest = logits[0], sum = 0;
    for (int a = 1; a < actions; a++) highest = fmaxf(highest, logits[a]);
    for (int a = 0; a < actions; a++) sum += probs[a] = expf(logits[a] - highest);
    float log_sum = highest + logf(sum), scale = 1 / sum;
    for (int a = 0; a < actions; a++) {
        log_probs[a] = logits[a] - log_sum;
        probs[a] *= scale;
    }
}

static float *zeros(size_t count) {
    float *found = calloc(count, sizeof(float));
    if (!found) exit(3);
    return found;
}

/* Plays an episode: its choices, context * actions + action; returns its length, and whether it is accepted. */
static int play(const float *cumulative, int instance, int32_t *choices, int *success) {
    int row = start_row[instance], length = 0, handed_in = 0;
    for (int step = 0; step < steps && row < rows; step++) {
        int context = step * views + view[step * (rows + 1) + row], action = 0;
        const float *bounds = cumulative + (size_t)context * actions;
        float u = uniform();
        for (int a = 0; a < actions - 1; a++) action += u >= bounds[a];
        choices[length++] = context * actions + action;
        size_t place = ((size_t)step * rows + row) * actions + action;
        handed_in = submission[place];
        row = next_row[place];
    }
    *success = accepted[handed_in * instances + instance];
    return length;
}

static double run(uint64_t seed, int iterations, int groups, int size, int epochs) {
    int contexts = steps * views, episodes = groups * size, length[size], success[size];
    size_t cells = (size_t)contexts * actions;
    float *logits = zeros(cells), *first = zeros(cells), *second = zeros(cells), *behavior = zeros(cells),
          *cumulative = zeros(cells), *plus = zeros(cells), *minus = zeros(cells), *gradient = zeros(cells),
          *visits = zeros(contexts), *p = zeros(actions), *log_probs = zeros(actions);
    int32_t *choices = malloc(sizeof(int32_t) * size * steps);
    double late_success = 0, decay1 = 1, decay2 = 1;
    float log_uniform = -logf((float)actions);
    generator = seed * 0xD1342543DE82EF95u + 1;
    for (int iteration = 0; iteration < iterations; iteration++) {
        memset(plus, 0, cells * sizeof(float));
        memset(minus, 0, cells * sizeof(float));
        memset(visits, 0, contexts * sizeof(float));
        for (int c = 0; c < contexts; c++) {
            log_softmax(logits + (size_t)c * actions, behavior + (size_t)c * actions, p);
            float below = 0;
            for (int a = 0; a < actions; a++) cumulative[(size_t)c * actions + a] = below += p[a];
        }
        for (int g = 0; g < groups; g++) {
            int instance = (int)(bits() % (uint64_t)instances), successes = 0;
            for (int e = 0; e < size; e++) {
                length[e] = play(cumulative, instance, choices + e * steps, success + e);
                successes += success[e];
            }
            if (iteration >= iterations - 10) late_success += (double)successes / episodes / 10;
            int failures = size - successes, mixed = successes && failures;
            float odds = mixed ? sqrtf((float)failures / (float)successes) : 0;
            for (int e = 0; e < size; e++) {
                float share = 1.0f / (float)(length[e] * episodes);
                float weight = !mixed ? 0 : success[e] ? share * odds : -share / odds;
                for (int i = 0; i < length[e]; i++) {
                    int choice = choices[e * steps + i];
                    visits[choice / actions] += share;
                    if (weight > 0) plus[choice] += weight;
                    else minus[choice] += weight;
                }
            }
        }
        for (int epoch = 0; epoch < epochs; epoch++) {
            float squares = 0;
            memset(gradient, 0, cells * sizeof(float));
            for (int c = 0; c < contexts; c++) {
                if (visits[c] == 0) continue;
                size_t at = (size_t)c * actions;
                float by_log_prob[actions], sum = 0;
                log_softmax(logits + at, log_probs, p);
                for (int a = 0; a < actions; a++) {
                    float ratio = expf(log_probs[a] - behavior[at + a]);
                    float slope = (ratio < 1 + CLIP ? plus[at + a] : 0) + (ratio > 1 - CLIP ? minus[at + a] : 0);
                    float g = -ratio * slope + BETA * visits[c] * p[a] * (log_probs[a] - log_uniform + 1);
                    sum += by_log_prob[a] = g;
                }
                for (int a = 0; a < actions; a++) {
                    gradient[at + a] = by_log_prob[a] - p[a] * sum;
                    squares += gradient[at + a] * gradient[at + a];
                }
            }
            float scale = fminf(1, 1 / (sqrtf(squares) + 1e-6f));
            decay1 *= 0.9, decay2 *= 0.999;
            float correct1 = (float)(1 / (1 - decay1)), correct2 = (float)(1 / (1 - decay2));
            for (size_t i = 0; i < cells; i++) {
                float d = gradient[i] * scale;
                first[i] = 0.9f * first[i] + 0.1f * d;
                second[i] = 0.999f * second[i] + 0.001f * d * d;
                logits[i] -= LR * first[i] * correct1 / (sqrtf(second[i] * correct2) + 1e-8f);
            }
        }
    }
    float *all[] = {logits, first, second, behavior, cumulative, plus, minus, gradient, visits, p, log_probs};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(choices);
    return late_success;
}

static int32_t *read_numbers(FILE *file, size_t count) {
    int32_t *found = malloc(sizeof(int32_t) * count);
    if (!found || fread(found, sizeof(int32_t), count, file) != count) exit(3);
    return found;
}

int main(int count, char **words) {
    int values[5] = {512, 100, 4, 8, 2};
    for (int i = 2; i < count && i <= 6; i++) values[i - 2] = atoi(words[i]);
    FILE *file = count > 1 ? fopen(words[1], "rb") : NULL;
    if (!file || values[0] < 1 || values[3] < 1) return 2;
    int32_t *sizes = read_numbers(file, 6);
    steps = sizes[0], rows = sizes[1], views = sizes[2], actions = sizes[3], instances = sizes[4], outcomes = sizes[5];
    next_row = read_numbers(file, (size_t)steps * rows * actions);
    submission = read_numbers(file, (size_t)steps * rows * actions);
    view = read_numbers(file, (size_t)steps * (rows + 1));
    start_row = read_numbers(file, instances);
    accepted = read_numbers(file, (size_t)outcomes * instances);
    struct timespec start, end;
    double result = 0;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; i < values[0]; i++) result += run((uint64_t)i, values[1], values[2], values[3], values[4]);
    clock_gettime(CLOCK_MONOTONIC, &end);
    double seconds = (double)(end.tv_sec - start.tv_sec) + (double)(end.tv_nsec - start.tv_nsec) * 1e-9;
    printf("%.9f %.6f\n", seconds, result / values[0]);
    return 0;
}
