/* From symbols to rows of the engine's cache. Most symbols are 0: a token's others are listed, and each adds a multiple of
 * a basis row. Bases are int8 (as the profile stores them; their units are in the values) and tiled, [width / TILE][rows]
 * [TILE], so that a tile stays in the first-level cache while a block's tokens pass. What is dense, a cell's joint part,
 * is a product in fixed point. */
#define TILE 64 /* columns of a basis that are summed at a time */

/* What a column of symbols stands for: row `row` of the basis of part `part` (0: the joint one, i + 1: cell i's tail, the
 * number of cells + 1: nothing), and how symbols become values: sign(s) * (|s| - shrink[|s| > 1]) * scale. */
typedef struct {
  float scale, shrink[2];
  int32_t part, row;
} Column;

typedef struct {
  int32_t at;  /* TILE * row of the basis */
  float value; /* what the row is multiplied with */
} Term;

/* out[TILE] = init + the sum of a token's terms in one tile. */
static void add_terms_portable(const Term *term, int64_t n, const int8_t *tile, const float *init, float *out) {
  float sum[TILE];
  memcpy(sum, init, sizeof sum);
  for (int64_t i = 0; i < n; i++) {
    const int8_t *row = tile + term[i].at;
    for (int j = 0; j < TILE; j++) sum[j] += term[i].value * (float)row[j];
  }
  memcpy(out, sum, sizeof sum);
}

#if CG_X86
/* Two terms in fixed point: sums of int16 times int8 in 32 bits are exact, and take half of float32's instructions, or two
 * thirds without VNNI. */
typedef struct {
  int32_t at[2];
  int16_t value[2];
  float unit; /* of the values of this list */
} Pair;

/* A list of terms in pairs. Values are scaled so that neither they nor their sums overflow. */
static void pair_terms(const Term *term, int64_t n, Pair *pair) {
  float most = 0, all = 0;
  for (int64_t i = 0; i < n; i++) {
    float size = fabsf(term[i].value);
    most = size > most ? size : most;
    all += size;
  }
  float unit = most / 32767.0f, other = all * (128.0f / 2.1e9f);
  unit = other > unit ? other : unit;
  float per_unit = unit > 0 ? 1 / unit : 0;
  for (int64_t i = 0; i < n; i += 2) {
    const Term *second = term + (i + 1 < n ? i + 1 : i);
    int32_t low = _mm_cvtss_si32(_mm_set_ss(term[i].value * per_unit));
    int32_t high = i + 1 < n ? _mm_cvtss_si32(_mm_set_ss(second->value * per_unit)) : 0;
    pair[i / 2] = (Pair){{term[i].at, second->at}, {(int16_t)low, (int16_t)high}, unit};
  }
}

__attribute__((target("avx2,fma"))) static void add_pairs_avx2(const Pair *pair, int64_t n, const int8_t *tile,
                                                               const float *init, float *out) {
  __m256i sum[TILE / 8];
  for (int j = 0; j < TILE / 8; j++) sum[j] = _mm256_setzero_si256();
  for (int64_t i = 0; i < n; i++) {
    const int8_t *a = tile + pair[i].at[0], *b = tile + pair[i].at[1];
    __m256i v = _mm256_set1_epi32(pair_at(pair[i].value));
    for (int j = 0; j < TILE / 16; j++) {
      __m128i x = _mm_loadu_si128((const __m128i *)(a + 16 * j)), y = _mm_loadu_si128((const __m128i *)(b + 16 * j));
      __m256i low = _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(x, y)), high = _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(x, y));
      sum[2 * j] = _mm256_add_epi32(sum[2 * j], _mm256_madd_epi16(v, low));
      sum[2 * j + 1] = _mm256_add_epi32(sum[2 * j + 1], _mm256_madd_epi16(v, high));
    }
  }
  __m256 unit = _mm256_set1_ps(n ? pair->unit : 0);
  for (int j = 0; j < TILE / 8; j++)
    _mm256_storeu_ps(out + 8 * j, _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[j]), unit, _mm256_loadu_ps(init + 8 * j)));
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni"))) static void add_pairs_avx512(
    const Pair *pair, int64_t n, const int8_t *tile, const float *init, float *out) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  const __m512i zero = _mm512_setzero_si512();
  __m512i low0 = zero, high0 = zero, low1 = zero, high1 = zero; /* columns 8 i to 8 i + 3, and 8 i + 4 to 8 i + 7 */
  for (int64_t i = 0; i < n; i++) {
    const int8_t *a = tile + pair[i].at[0], *b = tile + pair[i].at[1];
    __m512i v = _mm512_set1_epi32(pair_at(pair[i].value));
    __m512i a0 = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)a));
    __m512i b0 = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)b));
    __m512i a1 = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(a + 32)));
    __m512i b1 = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(b + 32)));
    add_pairs(&low0, v, _mm512_unpacklo_epi16(a0, b0));
    add_pairs(&high0, v, _mm512_unpackhi_epi16(a0, b0));
    add_pairs(&low1, v, _mm512_unpacklo_epi16(a1, b1));
    add_pairs(&high1, v, _mm512_unpackhi_epi16(a1, b1));
  }
  __m512 unit = _mm512_set1_ps(n ? pair->unit : 0);
  const __m512i sums[4] = {
      _mm512_permutex2var_epi32(low0, first, high0), _mm512_permutex2var_epi32(low0, second, high0),
      _mm512_permutex2var_epi32(low1, first, high1), _mm512_permutex2var_epi32(low1, second, high1)};
  for (int j = 0; j < 4; j++)
    _mm512_storeu_ps(out + 16 * j, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[j]), unit, _mm512_loadu_ps(init + 16 * j)));
}
#endif

/* The terms of the tokens of a block, in lists: one for the joint part and one for each cell, of every token. */
typedef struct {
  int64_t parts;       /* lists a token, the last one for padding columns */
  int32_t *base, *end; /* [parts]: where a part's list begins, [BLOCK][parts]: and ends, in a token's terms */
  int64_t room;        /* terms of a token */
  Term *term;          /* [BLOCK][room] */
#if CG_X86
  Pair *pair; /* the same in pairs, for AVX2 and up; a list has one more than half as many */
#endif
} Terms;

#if CG_X86
static inline Pair *pairs_of(const Terms *terms, int64_t token, int64_t part) {
  return terms->pair + token * (terms->room / 2 + terms->parts) + terms->base[part] / 2 + part;
}
#endif

static inline void add_terms(const Terms *terms, int64_t token, int64_t part, const int8_t *tile, const float *init,
                             float *out) {
  const Term *term = terms->term + token * terms->room + terms->base[part];
  int64_t n = terms->end[token * terms->parts + part] - terms->base[part];
#if CG_X86
  if (isa >= 1) {
    (isa == 2 ? add_pairs_avx512 : add_pairs_avx2)(pairs_of(terms, token, part), (n + 1) / 2, tile, init, out);
    return;
  }
#endif
  add_terms_portable(term, n, tile, init, out);
}

/* Round to nearest even, as the hardware does; the caller has clamped to the finite range. */
static uint16_t half_bits(float value) {
  uint32_t b;
  memcpy(&b, &value, 4);
  uint32_t sign = b >> 16 & 0x8000, mag = b & 0x7fffffff;
  if (mag < 0x38800000) { /* below 2^-14: subnormal halves, units of 2^-24 */
    float m;
    memcpy(&m, &mag, 4);
    return (uint16_t)(sign | (uint32_t)lrintf(m * 16777216.0f));
  }
  mag += 0xfff + (mag >> 13 & 1);
  return (uint16_t)(sign | ((mag - 0x38000000) >> 13));
}

static void store_half_portable(const float *v, int64_t n, uint16_t *out) {
  for (int64_t i = 0; i < n; i++) {
    float x = v[i] > 65504.0f ? 65504.0f : v[i] < -65504.0f ? -65504.0f : v[i];
    out[i] = half_bits(x);
  }
}

#if CG_X86
__attribute__((target("avx2,f16c"))) static void store_half_avx2(const float *v, int64_t n, uint16_t *out) {
  const __m256 top = _mm256_set1_ps(65504.0f), bottom = _mm256_set1_ps(-65504.0f);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 x = _mm256_max_ps(_mm256_min_ps(_mm256_loadu_ps(v + i), top), bottom);
    _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  store_half_portable(v + i, n - i, out + i);
}
#endif

static void store_half(const float *v, int64_t n, uint16_t *out) {
#if CG_X86
  if (isa >= 1) {
    store_half_avx2(v, n, out);
    return;
  }
#endif
  store_half_portable(v, n, out);
}

/* Rotate a head's leading channels, `2 * pairs` of them in interleaved pairs: v[i] * turn[i] + v[i ^ 1] * cross[i]. */
static void rotate_portable(const float *v, const float *turn, const float *cross, int64_t channels, float *out) {
  for (int64_t i = 0; i < channels; i += 2) {
    out[i] = v[i] * turn[i] + v[i + 1] * cross[i];
    out[i + 1] = v[i + 1] * turn[i + 1] + v[i] * cross[i + 1];
  }
}

#if CG_X86
__attribute__((target("avx2,fma"))) static void rotate_avx2(const float *v, const float *turn, const float *cross,
                                                            int64_t channels, float *out) {
  int64_t i = 0;
  for (; i + 8 <= channels; i += 8) {
    __m256 x = _mm256_loadu_ps(v + i);
    __m256 other = _mm256_mul_ps(_mm256_permute_ps(x, 0xb1), _mm256_loadu_ps(cross + i));
    _mm256_storeu_ps(out + i, _mm256_fmadd_ps(x, _mm256_loadu_ps(turn + i), other));
  }
  rotate_portable(v + i, turn + i, cross + i, channels - i, out + i);
}
#endif

static void rotate(const float *v, const float *turn, const float *cross, int64_t channels, float *out) {
#if CG_X86
  if (isa >= 1) {
    rotate_avx2(v, turn, cross, channels, out);
    return;
  }
#endif
  rotate_portable(v, turn, cross, channels, out);
}

/* One cell of a block: the channels of some heads of one layer, keys or values. */
typedef struct {
  const int16_t *head; /* basis rows of the joint part, as Fixed has them, and their */
  const float *scale;  /* units, [width] */
  const int8_t *tail; /* [tiles][own][TILE]: basis rows of the cell's own components */
  const float *mean;  /* [width] */
  char *rows;         /* where token 0's first head goes */
  int64_t token_stride, head_stride; /* bytes; channels are contiguous */
  int64_t own;        /* components of the cell's own that this level codes */
  int64_t heads, dim, width; /* width: heads * dim rounded up to TILE */
  int64_t rotary;     /* channels of a head to rotate, 0 for values */
} Cell;

/* A bit for every of 32 symbols that is not 0. */
static inline uint32_t nonzero(const int8_t *symbols) {
#if CG_X86
  const __m128i zero = _mm_setzero_si128();
  __m128i low = _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)symbols), zero);
  __m128i high = _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)(symbols + 16)), zero);
  return ~((uint32_t)_mm_movemask_epi8(low) | (uint32_t)_mm_movemask_epi8(high) << 16);
#else
  uint32_t bits = 0;
  for (int i = 0; i < 32; i++) bits |= (uint32_t)(symbols[i] != 0) << i;
  return bits;
#endif
}

/* Lists the terms of a token, part by part. A part's list has room for all its components; next[part] is where it begins,
 * and afterwards ends. Returns the number of escapes that were used up. */
NOINLINE static int64_t list_terms(const int8_t *symbols, const Column *column, int64_t columns, int64_t first,
                                   const int64_t *escape_at, const int32_t *escape_value, int64_t escapes, float gain,
                                   Term *term, int32_t *next) {
  int64_t e = 0;
  for (int64_t group = 0; group < columns; group += GROUP)
    for (uint32_t bits = nonzero(symbols + group); bits; bits &= bits - 1) {
      int64_t c = group + __builtin_ctz(bits);
      const Column *to = column + c;
      int v = symbols[c], sign = v >> 31, m = (v ^ sign) - sign; /* signs are random: no branch on them */
      float size = (float)m - to->shrink[m > 1];
      size *= (float)(2 * sign + 1);
      if (v == ESCAPE && e < escapes && escape_at[e] == first + c) size = (float)escape_value[e++];
      term[next[to->part]++] = (Term){TILE * to->row, size * to->scale * gain};
    }
  return e;
}

/* Symbols of one block to rows of the engine's cache.
 *
 * symbols [rows][columns]; escapes: indices into symbols (increasing), and values; a token's values are multiplied by
 * gain[token]. joint_basis [tiles][active][TILE], joint_width = cells * joint rounded up to TILE. cosine, sine
 * [rows][rotary / 2]. halves: rotary pairs are (i, i + rotary / 2) in the output. half_out: rows are fp16, else float32.
 */
API int cg_reconstruct(const int8_t *symbols, int64_t rows, const Column *column, int64_t columns,
                       const int64_t *escape_at, const int32_t *escape_value, int64_t escapes, const float *gain,
                       const int8_t *joint_basis, int64_t active, int64_t joint, int64_t joint_width, const Cell *cells,
                       int64_t n_cells, const float *cosine, const float *sine, int halves, int half_out) {
  int64_t widest = 0, longest = 0, pairs = 0, parts = n_cells + 2;
  for (int64_t i = 0; i < n_cells; i++) {
    if (cells[i].width > widest) widest = cells[i].width;
    if (cells[i].dim > longest) longest = cells[i].dim;
    if (cells[i].rotary > 2 * pairs) pairs = cells[i].rotary / 2;
  }
  Terms terms = {.parts = parts, .room = columns}; /* a column has one place: columns are enough */
  terms.base = calloc((size_t)parts, sizeof *terms.base);
  terms.end = malloc((size_t)(BLOCK * parts) * sizeof *terms.end);
  terms.term = malloc((size_t)(BLOCK * columns + 1) * sizeof *terms.term);
  int ready = terms.base && terms.end && terms.term;
#if CG_X86
  terms.pair = isa >= 1 ? malloc((size_t)(BLOCK * (columns / 2 + parts)) * sizeof *terms.pair) : NULL;
  ready = ready && (isa < 1 || terms.pair);
#endif
  float *zeros = calloc(TILE, 4), back[BLOCK];
  int16_t *fixed = calloc((size_t)(BLOCK * (joint + 1)) + 1, sizeof *fixed);
  float *y = calloc((size_t)(BLOCK * joint_width) + 1, 4);
  float *x = calloc((size_t)(BLOCK * widest) + 1, 4);
  float *turn = malloc((size_t)(2 * BLOCK * pairs) * 4 + 4), *cross = malloc((size_t)(2 * BLOCK * pairs) * 4 + 4);
  float *turned = malloc((size_t)longest * 4 + 4), *split = malloc((size_t)longest * 4 + 4);
  int result = ready && zeros && fixed && y && x && turn && cross && turned && split ? CG_OK : CG_MEMORY;
  if (result == CG_OK) {
    terms.base[1] = (int32_t)active;
    for (int64_t i = 0; i < n_cells; i++) terms.base[i + 2] = terms.base[i + 1] + (int32_t)cells[i].own;
  }
  int64_t e = 0;
  for (int64_t first = 0; result == CG_OK && first < rows; first += BLOCK) {
    int64_t n = rows - first < BLOCK ? rows - first : BLOCK;
    for (int64_t t = 0; t < n; t++) {
      int32_t *end = memcpy(terms.end + t * parts, terms.base, (size_t)parts * sizeof *end);
      e += list_terms(symbols + (first + t) * columns, column, columns, (first + t) * columns, escape_at + e,
                      escape_value + e, escapes - e, gain[first + t], terms.term + t * columns, end);
#if CG_X86
      for (int64_t i = 0; isa >= 1 && i <= n_cells; i++)
        pair_terms(terms.term + t * columns + terms.base[i], end[i] - terms.base[i], pairs_of(&terms, t, i));
#endif
    }
    for (int64_t i = 0; i < n * pairs; i++) {
      turn[2 * i] = turn[2 * i + 1] = cosine[first * pairs + i];
      cross[2 * i] = -sine[first * pairs + i];
      cross[2 * i + 1] = sine[first * pairs + i];
    }
    for (int64_t j = 0; j < joint_width; j += TILE)
      for (int64_t t = 0; t < n; t++)
        add_terms(&terms, t, 0, joint_basis + j * active, zeros, y + t * joint_width + j);
    for (int64_t i = 0; i < n_cells; i++) {
      const Cell *cell = cells + i;
      Fixed head = {cell->head, cell->scale, joint, cell->width};
      result = to_fixed(y + i * joint, joint_width, n, joint, NULL, NULL, fixed, back);
      if (result) break;
      product(fixed, back, n, &head, cell->mean, x, cell->width);
      for (int64_t j = 0; cell->own && j < cell->width; j += TILE)
        for (int64_t t = 0; t < n; t++)
          add_terms(&terms, t, i + 1, cell->tail + j * cell->own, x + t * cell->width + j, x + t * cell->width + j);
      for (int64_t t = 0; t < n; t++)
        for (int64_t h = 0; h < cell->heads; h++) {
          const float *v = x + t * cell->width + h * cell->dim;
          char *to = cell->rows + (first + t) * cell->token_stride + h * cell->head_stride;
          if (cell->rotary) {
            float *out = turned;
            rotate(v, turn + 2 * t * pairs, cross + 2 * t * pairs, 2 * pairs, out);
            if (halves) {
              for (int64_t k = 0; k < pairs; k++) split[k] = turned[2 * k], split[pairs + k] = turned[2 * k + 1];
              out = split;
            }
            memcpy(out + 2 * pairs, v + 2 * pairs, (size_t)(cell->dim - 2 * pairs) * 4);
            v = out;
          }
          if (half_out)
            store_half(v, cell->dim, (uint16_t *)to);
          else
            memcpy(to, v, (size_t)cell->dim * 4);
        }
    }
  }
  free(terms.base);
  free(terms.end);
  free(terms.term);
#if CG_X86
  free(terms.pair);
#endif
  free(zeros);
  free(fixed);
  free(y);
  free(x);
  free(turn);
  free(cross);
  free(turned);
  free(split);
  return result;
}
