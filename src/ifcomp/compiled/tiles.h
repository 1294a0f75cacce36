/* One variant of squares.c: for vectors of LANES floats, with tiles of up to ROWS outputs. Included once for each.
 *
 * A tile is ROWS x 2 vectors of one example's gradient, G_oj = sum_t b_to a_tj. It is summed over all positions in
 * registers, and squared there: gradients never come to memory. */

typedef float VARIANT(Vector) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define Vector VARIANT(Vector)
#define WIDTH (2 * LANES)

/* G of some outputs in the columns of one panel: a tile.
 *   rows       b; those of two outputs are `across` apart, those of two positions `along`
 *   panel      a, those of two positions `pitch` apart
 *   positions  which positions these are; NULL for the first ones
 *   count      how many there are
 *   low, high  where to put it */
static inline TARGET __attribute__((always_inline)) void VARIANT(form)(
    const int outputs, const float *rows, const int64_t across, const int64_t along, const float *panel,
    const int64_t pitch, const int32_t *positions, int64_t count, Vector *low, Vector *high)
{
    UNROLL
    for (int o = 0; o < outputs; o++)
        low[o] = high[o] = (Vector){0};
    for (int64_t k = 0; k < count; k++) {
        Vector first = *(const Vector *)(panel + k * pitch), second = *(const Vector *)(panel + k * pitch + LANES);
        IN_REGISTERS(first, second);
        const float *here = rows + (positions ? positions[k] : k) * along;
        if (positions)
            __builtin_prefetch(here + 128);
        UNROLL
        for (int o = 0; o < outputs; o++) {
            low[o] += here[o * across] * first;
            high[o] += here[o * across] * second;
        }
    }
}

/* Squares of a tile.
 *   rows       b as `pack` leaves it, [T, outputs]
 *   panel      a without positions that are all zero, [count, WIDTH]
 *   weights    W, [outputs, WIDTH]
 *   sums       the sum over outputs of W times the squares of G is added to these, [WIDTH]
 *   totals     if not NULL the squares are added to these instead, [outputs, WIDTH] */
static inline TARGET __attribute__((always_inline)) void VARIANT(square)(
    const int outputs, const float *rows, const float *panel, const int32_t *positions, int64_t count,
    const float *weights, float *sums, float *totals)
{
    Vector low[ROWS], high[ROWS];
    VARIANT(form)(outputs, rows, 1, outputs, panel, WIDTH, positions, count, low, high);
    if (totals) {
        UNROLL
        for (int o = 0; o < outputs; o++) {
            *(Vector *)(totals + o * WIDTH) += low[o] * low[o];
            *(Vector *)(totals + o * WIDTH + LANES) += high[o] * high[o];
        }
    } else {
        Vector first = *(const Vector *)sums, second = *(const Vector *)(sums + LANES);
        UNROLL
        for (int o = 0; o < outputs; o++) {
            first += low[o] * low[o] * *(const Vector *)(weights + o * WIDTH);
            second += high[o] * high[o] * *(const Vector *)(weights + o * WIDTH + LANES);
        }
        *(Vector *)sums = first;
        *(Vector *)(sums + LANES) = second;
    }
}

/* Add the first columns of a tile to gradients, whose outputs are `apart`. */
static inline TARGET __attribute__((always_inline)) void VARIANT(add)(
    const int outputs, const float *rows, int64_t across, const float *panel, int64_t pitch, int64_t count,
    float *gradients, int64_t apart, int64_t columns)
{
    Vector low[ROWS], high[ROWS];
    VARIANT(form)(outputs, rows, across, 1, panel, pitch, NULL, count, low, high);
    UNROLL
    for (int o = 0; o < outputs; o++) {
        float *to = gradients + o * apart, some[WIDTH];
        if (columns >= WIDTH) {
            *(Vector *)to += low[o];
            *(Vector *)(to + LANES) += high[o];
            continue;
        }
        *(Vector *)some = low[o];
        *(Vector *)(some + LANES) = high[o];
        for (int64_t j = 0; j < columns; j++)
            to[j] += some[j];
    }
}

/* One for each number of outputs, so that all sums of a tile fit into registers. */
#define DEFINE(outputs)                                                                                              \
    static TARGET void VARIANT(pack_##outputs)(const float *from, float *to, int64_t positions)                      \
    {                                                                                                                \
        pack(outputs, from, to, positions);                                                                          \
    }                                                                                                                \
    static TARGET void VARIANT(square_##outputs)(const float *rows, const float *panel, const int32_t *positions,    \
                                                 int64_t count, const float *weights, float *sums, float *totals)    \
    {                                                                                                                \
        VARIANT(square)(outputs, rows, panel, positions, count, weights, sums, totals);                              \
    }                                                                                                                \
    static TARGET void VARIANT(add_##outputs)(const float *rows, int64_t across, const float *panel, int64_t pitch,  \
                                              int64_t count, float *gradients, int64_t apart, int64_t columns)       \
    {                                                                                                                \
        VARIANT(add)(outputs, rows, across, panel, pitch, count, gradients, apart, columns);                         \
    }
#define NAME(outputs) {VARIANT(pack_##outputs), VARIANT(square_##outputs), VARIANT(add_##outputs)},
EACH_ROW(DEFINE)
static const Outputs VARIANT(with)[] = {{NULL, NULL, NULL}, EACH_ROW(NAME)};

/* a of one example and the columns of one panel, [positions, WIDTH], without positions that are all zero there, as
 * those are that see the padding of a convolution. Returns how many are left, and which. */
static TARGET int64_t VARIANT(pack_panel)(const Squares *s, const float *inputs, int64_t panel, float *packed,
                                          int32_t *positions)
{
    int64_t start = panel * WIDTH, width = s->columns - start < WIDTH ? s->columns - start : WIDTH, count = 0;
    for (int64_t t = 0; t < s->positions; t++) {
        const float *from = inputs + t * s->columns + start;
        float *to = packed + count * WIDTH;
        int64_t zeros = 0;
        if (width == WIDTH)
            memcpy(to, from, sizeof(float) * WIDTH);
        else
            for (int64_t j = 0; j < WIDTH; j++)
                to[j] = j < width ? from[j] : 0;
        while (zeros < WIDTH && to[zeros] == 0)
            zeros++;
        positions[count] = (int32_t)t;
        count += zeros < WIDTH;
    }
    return count;
}

/* Squares of the gradients of some examples, in the columns of some panels. */
static TARGET void VARIANT(squares)(const Squares *s, const Part *part)
{
    int64_t outputs = s->outputs, tiles = (outputs + ROWS - 1) / ROWS, each = s->cotangents * outputs * s->positions;
    int64_t block = block_size(each);
    int32_t *positions = (int32_t *)part->scratch;
    float *panel = part->scratch + s->positions, *rows = panel + s->positions * WIDTH;
    for (int64_t begin = part->first_example; begin < part->last_example; begin += block) {
        int64_t end = begin + block < part->last_example ? begin + block : part->last_example;
        for (int64_t c = begin * s->cotangents; c < end * s->cotangents; c++)
            for (int64_t i = 0; i < tiles; i++) {
                int64_t o = outputs * i / tiles, after = outputs * (i + 1) / tiles;
                int64_t from = (c * outputs + o) * s->positions;
                VARIANT(with)[after - o].pack(s->rows + from, rows + (from - begin * each), s->positions);
            }
        for (int64_t p = part->first; p < part->last; p++)
            for (int64_t e = begin; e < end; e++) {
                const float *inputs = s->inputs + e * s->positions * s->columns;
                int64_t count = VARIANT(pack_panel)(s, inputs, p, panel, positions);
                for (int64_t c = 0; c < s->cotangents; c++) {
                    float sums[WIDTH] = {0};
                    const float *own = rows + ((e - begin) * s->cotangents + c) * outputs * s->positions;
                    for (int64_t i = 0; i < tiles; i++) {
                        int64_t o = outputs * i / tiles, after = outputs * (i + 1) / tiles;
                        int64_t at = (p * outputs + o) * WIDTH;
                        VARIANT(with)[after - o].square(own + o * s->positions, panel, positions, count,
                                                        s->totals ? NULL : s->weights + at, sums,
                                                        s->totals ? s->totals + at : NULL);
                    }
                    for (int64_t j = 1; j < WIDTH && part->forms; j++)
                        sums[0] += sums[j];
                    if (part->forms)
                        part->forms[e * s->cotangents + c] += sums[0];
                }
            }
    }
}

/* Gradients of some examples and outputs. */
static TARGET void VARIANT(gradients)(const Gradients *g, const Part *part)
{
    int64_t outputs = part->last - part->first, tiles = (outputs + ROWS - 1) / ROWS;
    int64_t pitch = padded(g->columns, WIDTH), step = block_size(pitch);
    for (int64_t e = part->first_example; e < part->last_example; e++)
        for (int64_t begin = 0; begin < g->positions; begin += step) {
            int64_t count = begin + step < g->positions ? step : g->positions - begin;
            pack_windows(g, e, begin, count, part->scratch, pitch);
            for (int64_t start = 0; start < g->columns; start += WIDTH)
                for (int64_t i = 0; i < tiles; i++) {
                    int64_t o = part->first + outputs * i / tiles, after = part->first + outputs * (i + 1) / tiles;
                    VARIANT(with)[after - o].add(g->rows + e * g->example_stride + o * g->output_stride + begin,
                                                 g->output_stride, part->scratch + start, pitch, count,
                                                 g->gradients + (e * g->outputs + o) * g->columns + start, g->columns,
                                                 g->columns - start);
                }
        }
}

#undef Vector
#undef WIDTH
#undef DEFINE
#undef NAME
#undef VARIANT
#undef TARGET
#undef LANES
#undef ROWS
#undef EACH_ROW
#undef IN_REGISTERS
