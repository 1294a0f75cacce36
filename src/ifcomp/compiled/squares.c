/* Sums of squares of per-example gradients G = sum_t b_t a_t^T that never come to memory, and gradients from inputs that
 * never do.
 *
 * Matrix products of a library write G, which is then read to be squared, and read again to be summed: with few
 * positions T that takes longer than the products. And they read all inputs a of a convolution, in which every number
 * of an image is repeated for each offset of the kernel: with few outputs that takes longer than the products. Here
 * both are one. See tiles.h; what is below is shared by all processors. Python calls this through ctypes, after PyTorch
 * has been loaded. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* To be raised with every change of what Python sees. */
#define VERSION 4

/* Of the OpenMP library that PyTorch has loaded, whose threads are waiting for work: nothing else is linked, and no
 * compiler needs to know of OpenMP. Threads of our own would have to share the cores with these. */
extern void GOMP_parallel(void (*work)(void *), void *given, unsigned threads, unsigned flags);
extern int omp_get_thread_num(void);
extern int omp_get_num_threads(void);

/* Floats of b, or of unfolded inputs, that are worked on at once: half of the cache of a core. */
#define BLOCK 65536

/* Floats in which runs are copied: whatever is copied too much is overwritten by what comes after it. */
#define CHUNK 8

/* With fewer examples for each thread, some threads would wait for others. */
#define FEW 4

/* What to do; all arrays are without gaps.
 *   rows       b, [examples, cotangents, outputs, positions]
 *   inputs     a, [examples, positions, columns]
 *   weights    W in panels of columns, [panels, outputs, width]
 *   forms      sum_oj G_oj^2 W_oj in parts that are to be added up, [threads, examples, cotangents], 0 to begin with;
 *              NULL if totals are wanted
 *   totals     the squares of all examples and cotangents are added to these, in panels; NULL if forms are wanted
 *   scratch    for each thread `scratch_size` floats
 *   width      columns of a panel, which says what variant to use: up to `ifcomp_width`
 *   threads    which share the examples, or the panels if examples are few or totals are wanted */
typedef struct {
    const float *rows, *inputs, *weights;
    double *forms;
    float *totals, *scratch;
    int64_t examples, cotangents, outputs, positions, columns, scratch_size, width, threads;
} Squares;

/* Gradients to be added to, from images: inputs of a position are runs of numbers of its image.
 *   rows       b, [examples, outputs, positions], with strides for examples and outputs
 *   images     [examples, size]
 *   places     where in an image each position begins
 *   runs       where each run begins, from there
 *   gradients  G, [examples, outputs, columns]: those of all runs, `bias` more whose input is 1, and zeros after them
 *   scratch    for each thread `ifcomp_window_scratch` floats
 *   width      as for squares
 *   threads    which share the examples, or the outputs if examples are few */
typedef struct {
    const float *rows, *images;
    const int32_t *places, *runs;
    float *gradients, *scratch;
    int64_t examples, outputs, positions, columns, example_stride, output_stride, size, run_count, length, bias,
        scratch_size, width, threads;
} Gradients;

/* What one thread does: some examples, and some panels (of squares) or outputs (of gradients). */
typedef struct {
    int64_t first_example, last_example, first, last;
    double *forms;
    float *scratch;
} Part;

/* How many are worked on at once, examples or positions, if there are so many numbers for each. */
static int64_t block_size(int64_t each) { return each < BLOCK ? BLOCK / each : 1; }

/* Columns of all panels. */
static int64_t padded(int64_t columns, int64_t width) { return (columns + width - 1) / width * width; }

/* Functions for tiles of a certain number of outputs. */
typedef struct {
    void (*pack)(const float *, float *, int64_t);
    void (*square)(const float *, const float *, const int32_t *, int64_t, const float *, float *, float *);
    void (*add)(const float *, int64_t, const float *, int64_t, int64_t, float *, int64_t, int64_t);
} Outputs;

/* b of the outputs of a tile, from [outputs, positions] to [positions, outputs]. */
static inline __attribute__((always_inline)) void pack(const int outputs, const float *from, float *to,
                                                       int64_t positions)
{
    for (int64_t t = 0; t < positions; t++)
        for (int o = 0; o < outputs; o++)
            to[t * outputs + o] = from[o * positions + t];
}

#if defined(__x86_64__)

typedef float Chunk __attribute__((vector_size(4 * CHUNK), aligned(4), may_alias));

/* One run. */
static inline __attribute__((always_inline)) void copy_run(const float *from, float *to, int64_t length, int beyond)
{
    if (beyond)
        for (int64_t k = 0; k < length; k += CHUNK)
            *(Chunk *)(to + k) = *(const Chunk *)(from + k);
    else
        memcpy(to, from, sizeof(float) * length);
}

/* Inputs of some positions of an example, [count, pitch] and a chunk after them. `beyond` says whether a chunk can be
 * read after the image, `length` is that of a run or a bound of it. */
static inline __attribute__((always_inline)) void pack_runs(const Gradients *g, const float *image, const int32_t *places,
                                                            int64_t count, float *to, int64_t pitch, int64_t length,
                                                            int beyond)
{
    int64_t given = g->run_count * g->length;
    for (int64_t t = 0; t < count; t++, to += pitch) {
        for (int64_t r = 0; r < g->run_count; r++)
            copy_run(image + places[t] + g->runs[r], to + r * g->length, length, beyond);
        for (int64_t j = given; j < pitch; j += CHUNK)
            *(Chunk *)(to + j) = (Chunk){0};
        if (g->bias)
            to[given] = 1;
    }
}

static inline __attribute__((always_inline)) void pack_windows(const Gradients *g, int64_t example, int64_t first,
                                                               int64_t count, float *to, int64_t pitch)
{
    const float *image = g->images + example * g->size;
    const int32_t *places = g->places + first;
    if ((g->examples - example - 1) * g->size < CHUNK)
        pack_runs(g, image, places, count, to, pitch, g->length, 0);
    else if (g->length <= CHUNK)
        pack_runs(g, image, places, count, to, pitch, CHUNK, 1);
    else
        pack_runs(g, image, places, count, to, pitch, g->length, 1);
}

#define UNROLL _Pragma("GCC unroll 16")

/* Compilers would read these again for every output. */
#define KEPT(first, second) __asm__("" : "+v"(first), "+v"(second))

#define VARIANT(name) name##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define ROWS 6
#define IN_REGISTERS KEPT
#define EACH_ROW(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)
#include "tiles.h"

#ifdef WIDE_TARGET /* tests try this variant on other processors, where its vectors take two registers */
#define IN_REGISTERS(first, second)
#else
#define WIDE_TARGET "avx512f"
#define IN_REGISTERS KEPT
#endif
#define VARIANT(name) name##_avx512
#define TARGET __attribute__((target(WIDE_TARGET)))
#define LANES 16
#define ROWS 12
#define EACH_ROW(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12)
#include "tiles.h"

/* Columns of the widest panel on this processor; 0 where there is no variant for it. */
int ifcomp_width(void)
{
    if (__builtin_cpu_supports("avx512f"))
        return 32;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 16 : 0;
}

static void some_squares(const Squares *work, const Part *part)
{
    if (work->width == 32)
        squares_avx512(work, part);
    else
        squares_avx2(work, part);
}

static void some_gradients(const Gradients *work, const Part *part)
{
    if (work->width == 32)
        gradients_avx512(work, part);
    else
        gradients_avx2(work, part);
}

#else

int ifcomp_width(void) { return 0; }
static void some_squares(const Squares *work, const Part *part) { (void)work, (void)part; }
static void some_gradients(const Gradients *work, const Part *part) { (void)work, (void)part; }

#endif

/* What a thread does of all: some of the examples, or some of the others if these are to be shared, or examples few. */
static Part own_part(int64_t examples, int64_t others, int shared)
{
    int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    Part part = {0, examples, 0, others, NULL, NULL};
    if (shared || examples < FEW * threads) {
        part.first = others * thread / threads;
        part.last = others * (thread + 1) / threads;
    } else {
        part.first_example = examples * thread / threads;
        part.last_example = examples * (thread + 1) / threads;
    }
    return part;
}

static void thread_squares(void *given)
{
    const Squares *work = given;
    Part part = own_part(work->examples, padded(work->columns, work->width) / work->width, work->totals != NULL);
    part.scratch = work->scratch + omp_get_thread_num() * work->scratch_size;
    if (work->forms)
        part.forms = work->forms + omp_get_thread_num() * work->examples * work->cotangents;
    if (part.first < part.last)
        some_squares(work, &part);
}

static void thread_gradients(void *given)
{
    const Gradients *work = given;
    Part part = own_part(work->examples, work->outputs, 0);
    part.scratch = work->scratch + omp_get_thread_num() * work->scratch_size;
    if (part.first < part.last)
        some_gradients(work, &part);
}

void ifcomp_squares(Squares *work) { GOMP_parallel(thread_squares, work, (unsigned)work->threads, 0); }

void ifcomp_gradients(Gradients *work) { GOMP_parallel(thread_gradients, work, (unsigned)work->threads, 0); }

/* Floats that a thread needs for a panel and for b of a block of examples. */
int64_t ifcomp_scratch(int64_t examples, int64_t cotangents, int64_t outputs, int64_t positions, int64_t width)
{
    int64_t each = cotangents * outputs * positions, block = block_size(each);
    return positions * (1 + width) + (examples < block ? examples : block) * each;
}

/* Floats that a thread needs for the inputs of some positions. */
int64_t ifcomp_window_scratch(int64_t positions, int64_t columns, int64_t width)
{
    int64_t each = padded(columns, width), step = block_size(each);
    return (positions < step ? positions : step) * each + CHUNK;
}

int ifcomp_version(void) { return VERSION; }
