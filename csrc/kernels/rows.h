// Kernels whose unit is a row: layer norm, softmax, softmax cross-entropy, forward and backward;
// float32 inside.
#pragma once

namespace tensorlogic::TENSORLOGIC_ISA {

// Halves have sums and sums of squares in one reading: float32 has the digits to spare. Where it has not, since the mean is large
// beside the spread or squares overflow, and for float32, a second reading squares deviations.
struct Moments {
  float mean, rstd;
};
template <class S, class T>
INLINE Moments moments(const S* x, int64_t n, float eps, bool far) {
  const float inverse = 1.0f / static_cast<float>(n);
  constexpr float times = precise<T> ? 1.0f : 64.0f;
  vf s[4] = {set1(0), set1(0), set1(0), set1(0)}, q[4] = {set1(0), set1(0), set1(0), set1(0)};
  FOR_ROW(n, {
    ask_ahead(x + j, k, far);
    const vf v = load(x + j, lanes);
    s[k] = s[k] + v;
    if (!precise<S>) q[k] = fma(v, v, q[k]);
  })
  const float mean = sum(total(s)) * inverse, squares = sum(total(q)) * inverse;
  float spread = squares - mean * mean;
  if (precise<S> || !(mean * mean <= times * spread && squares < 1e38f)) {
    const vf m = set1(mean);
    q[0] = q[1] = q[2] = q[3] = set1(0);
    FOR_ROW(n, {
      const vf d = keep(load(x + j, lanes) - m, set1(0), lanes);
      q[k] = fma(d, d, q[k]);
    })
    spread = sum(total(q)) * inverse;
  }
  return {mean, 1.0f / __builtin_sqrtf(spread + eps)};
}

// x with a row's moments taken out, by a weight and a shift where there are such
template <class S, bool AFFINE>
struct Normed {
  const S* x;
  const float *gamma, *beta;
  vf mean, scale;
  template <class Lanes>
  INLINE_MEMBER vf at(int64_t j, Lanes lanes) const {
    const vf v = (load(x + j, lanes) - mean) * scale;
    if (AFFINE) return fma(v, load(gamma + j, lanes), load(beta + j, lanes));
    const vf weighted = gamma ? v * load(gamma + j, lanes) : v;
    return beta ? weighted + load(beta + j, lanes) : weighted;
  }
};

// The next row's moments are had before a row is written, so that nothing waits for their last sums.
template <class S, class T, bool AFFINE>
static void layer_norm_rows(const LayerNormCall& call, int64_t begin, int64_t end) {
  const int64_t n = call.cols;
  const bool far = (end - begin) * n >= FAR_FROM;
  const S* x = static_cast<const S*>(call.x) + begin * n;
  T* y = static_cast<T*>(call.y) + begin * n;
  Moments next = begin < end ? moments<S, T>(x, n, call.eps, far) : Moments{};
  for (int64_t r = begin; r < end; ++r, x += n, y += n) {
    const Moments row = next;
    if (r + 1 < end) next = moments<S, T>(x + n, n, call.eps, far);
    const Normed<S, AFFINE> normed{x, call.gamma, call.beta, set1(row.mean), set1(row.rstd)};
    int64_t done = 0;
    if constexpr (bf16_in_pairs && Is<T, bf16>)
      for (; done + 2 * W <= n; done += 2 * W)
        store_pair(y + done, pack(normed.at(done, All{}), normed.at(done + W, All{}), true));
    FOR_ROW(n - done, { store(y + done + j, normed.at(done + j, lanes), lanes); })
    call.mean[r] = row.mean;
    call.rstd[r] = row.rstd;
  }
}

template <class S, class T>
static void layer_norm_of(const LayerNormCall& call, int64_t begin, int64_t end) {
  if (call.gamma && call.beta)
    layer_norm_rows<S, T, true>(call, begin, end);
  else
    layer_norm_rows<S, T, false>(call, begin, end);
}

static void layer_norm(const LayerNormCall& call, int64_t begin, int64_t end) {
  DISPATCH(call.in, S, {
    if (call.out == DType::f32)
      layer_norm_of<S, float>(call, begin, end);
    else
      layer_norm_of<S, S>(call, begin, end);
  })
}

// dx = rstd (g - mean(g) - xhat mean(g xhat)), g = dy gamma; dgamma += dy xhat, dbeta += dy
template <class T>
static void layer_norm_backward_rows(const LayerNormBackwardCall& call, int64_t begin,
                                     int64_t end) {
  const int64_t n = call.cols;
  const float inverse = 1.0f / static_cast<float>(n);
  const float* gamma = call.gamma;
  for (int64_t r = begin; r < end; ++r) {
    const T* x = static_cast<const T*>(call.x) + r * n;
    const T* dy = static_cast<const T*>(call.dy) + r * n;
    T* dx = static_cast<T*>(call.dx) + r * n;
    const vf m = set1(call.mean[r]), rstd = set1(call.rstd[r]);
    vf s[4] = {set1(0), set1(0), set1(0), set1(0)}, q[4] = {set1(0), set1(0), set1(0), set1(0)};
    FOR_ROW(n, {
      vf d = load(dy + j, lanes), xhat = keep((load(x + j, lanes) - m) * rstd, set1(0), lanes),
         g = d;
      if (gamma) g = g * load(gamma + j, lanes);
      s[k] = s[k] + g;
      q[k] = fma(g, xhat, q[k]);
      store(call.dgamma + j, fma(d, xhat, load(call.dgamma + j, lanes)), lanes);
      store(call.dbeta + j, d + load(call.dbeta + j, lanes), lanes);
    })
    const vf a = set1(sum(total(s)) * inverse), b = set1(sum(total(q)) * inverse);
    FOR_ROW(n, {
      vf g = load(dy + j, lanes), xhat = (load(x + j, lanes) - m) * rstd;
      if (gamma) g = g * load(gamma + j, lanes);
      store(dx + j, rstd * fnma(xhat, b, g - a), lanes);
    })
  }
}

static void layer_norm_backward(const LayerNormBackwardCall& call, int64_t begin, int64_t end) {
  DISPATCH(call.dtype, T, layer_norm_backward_rows<T>(call, begin, end))
}

// What softmax sees at one place: scale * x + mask, minus infinity where excluded.
template <class S, class M>
struct Scores {
  const S* x;
  const M* mask;
  const uint8_t* keep;
  float scale;
  template <class Lanes>
  INLINE_MEMBER vf at(int64_t j, Lanes lanes) const {
    vf v = load(x + j, lanes) * set1(scale);
    if (mask) v = v + load(mask + j, lanes);
    if (keep) v = excluded(v, keep + j, lanes);
    return v;
  }
  INLINE_MEMBER static vf excluded(vf v, const uint8_t* keep, All) {
    typedef uint8_t bytes __attribute__((vector_size(W)));
    bytes k;
    __builtin_memcpy(&k, keep, W);
    return __builtin_convertvector(k, vi) == 0 ? set1(LOWEST) : v;
  }
  INLINE_MEMBER static vf excluded(vf v, const uint8_t* keep, Some s) {
    for (int i = 0; i < s.n; ++i) v[i] = keep[i] ? v[i] : LOWEST;
    return v;
  }
};

template <class S, class T, class M>
static void softmax_rows(const SoftmaxCall& call, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    int64_t n = call.cols;
    if (call.causal_rows) {
      int64_t seen = r % call.causal_rows + 1;
      n = seen < n ? seen : n;
    }
    int64_t mask_at = 0;
    for (int64_t d = 0, rest = r; d < call.mask_dims; rest /= call.mask_sizes[d++])
      mask_at += rest % call.mask_sizes[d] * call.mask_strides[d];
    const M* mask = static_cast<const M*>(call.mask);
    Scores<S, M> scores{static_cast<const S*>(call.x) + r * call.cols,
                        mask ? mask + mask_at : nullptr, call.keep ? call.keep + mask_at : nullptr,
                        call.scale};
    T* y = static_cast<T*>(call.y) + r * call.cols;
    vf peak[4] = {set1(LOWEST), set1(LOWEST), set1(LOWEST), set1(LOWEST)};
    // A NaN may leave the maximum again, but not the sum.
    FOR_ROW(n, peak[k] = vmax(peak[k], keep(scores.at(j, lanes), set1(LOWEST), lanes));)
    const vf m = set1(largest(vmax(vmax(peak[0], peak[1]), vmax(peak[2], peak[3]))));
    vf s[4] = {set1(0), set1(0), set1(0), set1(0)};
    // The exponentials wait for their sum in the output where that is float32, in a buffer where
    // they fit.
    float buffer[precise<T> ? 1 : BLOCK];
    float* held = buffer;
    if constexpr (precise<T>) held = y;
    const bool kept = precise<T> || n <= BLOCK;
    FOR_ROW(n, {
      vf e = exp_minus<T>(scores.at(j, lanes), m);
      if (kept) store(held + j, e, lanes);
      s[k] = s[k] + keep(e, set1(0), lanes);
    })
    const float norm = sum(total(s));
    const vf scale = set1(1.0f / norm);
    FOR_ROW(n, {
      vf e = kept ? load(held + j, lanes) : exp_minus<T>(scores.at(j, lanes), m);
      store(y + j, e * scale, lanes);
    })
    // A row without one finite score is NaN as a whole, what it must not see included.
    const vf rest = set1(norm == norm ? 0.0f : norm);
    T* unseen = y + n;
    FOR_ROW(call.cols - n, store(unseen + j, rest, lanes);)
  }
}

// W short rows at a time, a lane each, as reductions have them: `some` rows of n from and to memory.
template <class T>
INLINE void widen_rows(const T* x, float* wide, int64_t n, int64_t some) {
  for (int64_t j = 0; j < some * n; j += W) {
    if (j + W <= some * n)
      store(wide + j, load(x + j, All{}), All{});
    else
      store(wide + j, load(x + j, Some{some * n - j}), All{});
  }
}
template <class T>
INLINE void narrow_rows(const vf* columns, float* wide, T* y, int64_t n, int64_t some) {
  for (int64_t j = 0; j < n; ++j)
    for (int64_t l = 0; l < W; ++l) wide[l * n + j] = columns[j][l];
  for (int64_t j = 0; j < some * n; j += W) {
    if (j + W <= some * n)
      store(y + j, load(wide + j, All{}), All{});
    else
      store(y + j, load(wide + j, All{}), Some{some * n - j});
  }
}

// Without a mask.
template <class S, class T>
static void softmax_short(const SoftmaxCall& call, int64_t begin, int64_t end) {
  const int64_t n = call.cols;
  alignas(64) float wide[W * SHORT_ROW] = {};
  for (int64_t r = begin; r < end; r += W) {
    const int64_t some = least(end - r, W);
    widen_rows(static_cast<const S*>(call.x) + r * n, wide, n, some);
    vf v[SHORT_ROW], peak = set1(LOWEST), norm = set1(0);
    for (int64_t j = 0; j < n; ++j) {
      v[j] = strided(wide + j, n) * set1(call.scale);
      peak = vmax(peak, v[j]);  // a NaN may leave it again, but not the sum
    }
    for (int64_t j = 0; j < n; ++j) {
      v[j] = exp_minus<T>(v[j], peak);
      norm = norm + v[j];
    }
    const vf scale = set1(1.0f) / norm;
    for (int64_t j = 0; j < n; ++j) v[j] = v[j] * scale;
    narrow_rows(v, wide, static_cast<T*>(call.y) + r * n, n, some);
  }
}

template <class S, class T>
static void softmax_masked(const SoftmaxCall& call, int64_t begin, int64_t end) {
  if (call.cols < SHORT_ROW && !call.mask && !call.keep && !call.causal_rows)
    return softmax_short<S, T>(call, begin, end);
  if (call.mask_dtype == DType::f32)
    softmax_rows<S, T, float>(call, begin, end);
  else
    softmax_rows<S, T, T>(call, begin, end);
}

static void softmax(const SoftmaxCall& call, int64_t begin, int64_t end) {
  DISPATCH(call.out, T, {
    if (call.in == DType::f32)
      softmax_masked<float, T>(call, begin, end);
    else
      softmax_masked<T, T>(call, begin, end);
  })
}

constexpr int64_t CHAINS = 64 * W;  // elements that four vectors sum: their terms may cancel, and a chain of 16 rounds little

template <class T>
static void softmax_backward_short(const void* dy, const void* y, void* dx, int64_t n, float scale,
                                   int64_t begin, int64_t end) {
  alignas(64) float left[W * SHORT_ROW] = {}, right[W * SHORT_ROW] = {};
  for (int64_t r = begin; r < end; r += W) {
    const int64_t some = least(end - r, W);
    widen_rows(static_cast<const T*>(y) + r * n, left, n, some);
    widen_rows(static_cast<const T*>(dy) + r * n, right, n, some);
    vf v[SHORT_ROW], mean = set1(0);
    for (int64_t j = 0; j < n; ++j) mean = fma(strided(left + j, n), strided(right + j, n), mean);
    for (int64_t j = 0; j < n; ++j)
      v[j] = strided(left + j, n) * (strided(right + j, n) - mean) * set1(scale);
    narrow_rows(v, left, static_cast<T*>(dx) + r * n, n, some);
  }
}

// dx = scale y (dy - sum(dy y))
static void softmax_backward(DType dtype, const void* dy_all, const void* y_all, void* dx_all,
                             int64_t n, float scale, int64_t begin, int64_t end) {
  DISPATCH(dtype, T, {
    const bool brief = n < 2 * W && n % W;  // of whole vectors sums along a row cost less
    if (brief) softmax_backward_short<T>(dy_all, y_all, dx_all, n, scale, begin, end);
    for (int64_t r = brief ? end : begin; r < end; ++r) {
      const T* y = static_cast<const T*>(y_all) + r * n;
      const T* dy = static_cast<const T*>(dy_all) + r * n;
      T* dx = static_cast<T*>(dx_all) + r * n;
      double weighed = 0.0;
      for (int64_t first = 0; first < n; first += CHAINS) {
        const T *of = y + first, *by = dy + first;
        const int64_t some = least(n - first, CHAINS);
        vf s[4] = {set1(0), set1(0), set1(0), set1(0)};
        FOR_ROW(some, s[k] = fma(load(of + j, lanes), load(by + j, lanes), s[k]);)
        weighed += sum(total(s));
      }
      const vf mean = set1(static_cast<float>(weighed)), factor = set1(scale);
      FOR_ROW(n, store(dx + j, load(y + j, lanes) * (load(dy + j, lanes) - mean) * factor, lanes);)
    }
  })
}

struct RowStatistics {
  float peak, exponentials, sum;
};

// Maximum, sum of e^(x - maximum) and (where asked for) of scale x - off of one row, each element read once. Until
// the end the first sum is of e^(x - peak), `peak` less than RISE below the maximum: a block whose elements rise further is done again.
template <class T>
INLINE RowStatistics row_statistics(const T* x, int64_t n, bool with_sum, bool far, float scale,
                                    float off) {
  constexpr float RISE = 60.0f;
  RowStatistics all{LOWEST, 0.0f, 0.0f};
  float most = LOWEST;
  for (int64_t first = 0, size; first < n; first += size) {
    const T* block = x + first;
    size = all.peak == LOWEST ? FIRST_BLOCK : BLOCK;
    if (size > n - first) size = n - first;
    float peak = all.peak;
    vf peaks[4] = {set1(LOWEST), set1(LOWEST), set1(LOWEST), set1(LOWEST)};
    if (peak == LOWEST) {
      FOR_ROW(size, peaks[k] = vmax(peaks[k], keep(load(block + j, lanes), set1(LOWEST), lanes));)
      peak = largest(vmax(vmax(peaks[0], peaks[1]), vmax(peaks[2], peaks[3])));
    }
    for (;;) {
      const vf m = set1(peak == LOWEST ? 0.0f : peak);
      vf s[4] = {set1(0), set1(0), set1(0), set1(0)};
      FOR_ROW(size, {
        const vf v = keep(load(block + j, lanes), set1(LOWEST), lanes);
        ask_ahead(block + j, k, far);
        peaks[k] = vmax(peaks[k], v);
        s[k] = add_exp<T>(s[k], v, m);
      })
      const float top = largest(vmax(vmax(peaks[0], peaks[1]), vmax(peaks[2], peaks[3])));
      if (top > peak + RISE) {
        all.exponentials *= __builtin_expf(all.peak - top);
        all.peak = peak = top;
        continue;
      }
      all.exponentials += sum(total(s));
      most = top > most ? top : most;
      break;
    }
    all.peak = peak;
    if (with_sum) {
      const vf a = set1(scale), b = set1(-off);
      vf s[4] = {set1(0), set1(0), set1(0), set1(0)};
      FOR_ROW(size, s[k] = s[k] + keep(fma(load(block + j, lanes), a, b), set1(0), lanes);)
      all.sum += sum(total(s));
    }
  }
  if (most > all.peak) {  // so that no large logarithm is added to what it cancels
    all.exponentials *= __builtin_expf(all.peak - most);
    all.peak = most;
  }
  return all;
}

// loss = (1 - s) (lse - x[t]) + s (lse - mean(x)); ignored rows give 0 and are not read
static void cross_entropy(const CrossEntropyCall& call, int64_t begin, int64_t end) {
  const bool far = (end - begin) * call.cols >= FAR_FROM;
  const float cols = static_cast<float>(call.cols);
  const float scale = __builtin_ldexpf(1.0f, -3 - __builtin_ilogbf(cols));
  DISPATCH(call.dtype, T, {
    for (int64_t r = begin; r < end; ++r) {
      const T* x = static_cast<const T*>(call.logits) + r * call.cols;
      call.loss[r] = call.lse[r] = 0.0f;
      if (call.target[r] == call.ignore_index) continue;
      // The mean is taken from the target's logit where that is a number, in powers of two that leave
      // so many room: no large logits cancel, rows of the largest overflow nowhere.
      const float hit = load(x + call.target[r], Some{1})[0];
      const float off = __builtin_isfinite(hit) ? hit * scale : 0.0f;
      RowStatistics row = row_statistics(x, call.cols, call.smoothing > 0.0f, far, scale, off);
      // The peak's own share is 1, which approximate powers may miss; NaN stays.
      if (row.exponentials < 1.0f) row.exponentials = 1.0f;
      // The peak is subtracted before the logarithm is added: large logits would swallow it.
      const float rest = __builtin_logf(row.exponentials);
      float loss = row.peak - hit + rest;
      if (call.smoothing > 0.0f) {
        const float above = (row.peak * scale - off - row.sum / cols) / scale;
        loss = (1.0f - call.smoothing) * loss + call.smoothing * (above + rest);
      }
      call.loss[r] = loss;
      call.lse[r] = row.peak + rest;
    }
  })
}

// Of a power of two: probabilities below have no gradient, so that what a loss's weight leaves of others is a normal number, too.
constexpr float FAINT = -96.0f;

template <class T>
struct CrossEntropyGrad {
  static constexpr int outputs = 1;
  static constexpr bool ties_even = true, apart = false;
  static constexpr Activation last = Activation::none;
  const T* x;
  vf lse, share, scale, floor;
  template <class Lanes>
  INLINE_MEMBER Pair at(int64_t i, Lanes lanes) const {
    vf v = (exp_minus<T>(load(x + i, lanes), lse, FAINT) * share - floor) * scale;
    return {v, v};
  }
  template <int64_t N>
  INLINE_MEMBER void ahead(int64_t i) const {
    Source<T>{x, -1}.template ahead<N>(i);
  }
};

// 1 / sum(e^(x - lse)): 1 but for the rounding of lse, which is as large as lse is. Asked for where
// that would show in T.
template <class T>
INLINE float unrounded(const T* x, float lse, int64_t n) {
  if (__builtin_fabsf(lse) < (precise<T> ? 16.0f : 1024.0f)) return 1.0f;
  const vf m = set1(lse);
  vf s[4] = {set1(0), set1(0), set1(0), set1(0)};
  FOR_ROW(n, s[k] = s[k] + keep(exp_minus<T>(load(x + j, lanes), m), set1(0), lanes);)
  return 1.0f / sum(total(s));
}

// dlogits = dloss (e^(x - lse) - target distribution)
static void cross_entropy_backward(const CrossEntropyBackwardCall& call, int64_t begin,
                                   int64_t end) {
  DISPATCH(call.dtype, T, {
    for (int64_t r = begin; r < end; ++r) {
      T* dx = static_cast<T*>(call.dlogits) + r * call.cols;
      if (call.target[r] == call.ignore_index) {
        for (int64_t j = 0; j < call.cols; ++j) dx[j] = T{};
        continue;
      }
      const T* x = static_cast<const T*>(call.logits) + r * call.cols;
      const float floor = call.smoothing / static_cast<float>(call.cols), dloss = call.dloss[r];
      const float share = unrounded(x, call.lse[r], call.cols);
      CrossEntropyGrad<T> e{x, set1(call.lse[r]), set1(share), set1(dloss), set1(floor)};
      const int64_t t = call.target[r];
      const float likely = exp_minus<T>(load(x + t, Some{1}), e.lse)[0] * share;
      const float hit = (likely - floor - (1.0f - call.smoothing)) * dloss;
      emit(e, dx, dx, call.cols, call.stream, (end - r) * call.cols);
      store(dx + t, set1(hit), Some{1});
    }
  })
}

static void scaled_relu(DType dtype, const float* acc, const float* scale, const float* shift,
                        void* y, int64_t cols, int64_t begin, int64_t end) {
  DISPATCH(dtype, T, {
    for (int64_t r = begin; r < end; ++r) {
      const float* x = acc + r * cols;
      T* out = static_cast<T*>(y) + r * cols;
      FOR_ROW(cols, store(out + j, relu(load(x + j, lanes) * load(scale + j, lanes) +
                                        load(shift + j, lanes)), lanes);)
    }
  })
}

}  // namespace tensorlogic::TENSORLOGIC_ISA
