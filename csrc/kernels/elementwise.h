// Element-wise formulas over contiguous memory, float32 inside, rounded once: one pass, any mix of
// broadcast operands.
#pragma once

namespace tensorlogic::TENSORLOGIC_ISA {

// One input of a run of elements. A repeated element lies 2 W times in a buffer and has mask 0, so
// that it costs no branch.
template <class T>
struct Source {
  const T* p;
  int64_t mask;
  int64_t far = AHEAD;  // 0 where what follows in memory is not read
  template <class Lanes>
  INLINE_MEMBER vf at(int64_t i, Lanes lanes) const {
    return load(p + (i & mask), lanes);
  }
  template <int64_t N>  // asks for N elements that are soon read
  INLINE_MEMBER void ahead(int64_t i) const {
    constexpr int64_t LINE = 64 / sizeof(T);
#pragma GCC unroll 4
    for (int64_t o = 0; o < N; o += LINE) __builtin_prefetch(p + ((i + o + far) & mask));
  }
};

struct Pair {
  vf first, second;
};

// The largest number that a T rounds to 0.
template <class T>
constexpr float vanishing = Is<T, f16> ? 0x1p-25f : Is<T, bf16> ? 0x1p-134f : 0.0f;

template <class T, Elementwise O>
INLINE Pair combine(vf a, vf b, vf c) {
  using E = Elementwise;
  vf zero = set1(0.0f), y = a;
  if constexpr (O == E::add) y = a + b;
  if constexpr (O == E::sub) y = a - b;
  if constexpr (O == E::mul) y = a * b;
  if constexpr (O == E::div) y = a / b;
  if constexpr (O == E::add_relu) y = relu(a + b);
  if constexpr (O == E::mul_relu) y = relu(a * b);
  if constexpr (O == E::affine) y = fma(a, b, c);
  if constexpr (O == E::neg) y = -a;
  if constexpr (O == E::relu) y = relu(a);
  if constexpr (O == E::gelu) y = gelu<T>(a);
  if constexpr (O == E::gelu_tanh) y = gelu_tanh<T>(a);
  if constexpr (O == E::silu) y = silu<T>(a);
  if constexpr (O == E::relu_bwd) y = b <= zero ? zero : a;
  if constexpr (O == E::gelu_bwd) y = a * gelu_grad<T>(b);
  if constexpr (O == E::gelu_tanh_bwd) y = a * gelu_tanh_grad<T>(b);
  if constexpr (O == E::silu_bwd) y = a * silu_grad<T>(b);
  if constexpr (O == E::mul_bwd) return {a * c, a * b};
  if constexpr (O == E::mul_relu_bwd) {
    vf d = b * c <= set1(vanishing<T>) ? zero : a;  // the output, which is not read, is 0 there
    return {d * c, d * b};
  }
  if constexpr (O == E::div_bwd) {
    y = a / c;
    return {y, -y * (b / c)};
  }
  return {y, y};
}

constexpr Activation activation_of(Elementwise op) {
  using E = Elementwise;
  return op == E::gelu ? Activation::gelu
         : op == E::gelu_tanh ? Activation::gelu_tanh
         : op == E::silu ? Activation::silu : Activation::none;
}

constexpr int inputs_of(Elementwise op) {
  using E = Elementwise;
  if (op >= E::mul_bwd || op == E::affine) return 3;
  if (op >= E::neg && op <= E::silu) return 1;
  return 2;
}

template <class T, Elementwise O>
struct Formula {
  static constexpr int inputs = inputs_of(O), outputs = O >= Elementwise::mul_bwd ? 2 : 1;
  static constexpr bool ties_even = O < Elementwise::gelu || O > Elementwise::silu;
  static constexpr bool apart = Is<T, bf16>;  // all inputs may come as even and odd elements
  static constexpr Activation last = activation_of(O);  // what is done to `before`
  Source<T> in[3];
  template <class Lanes>
  INLINE_MEMBER vf before(int64_t i, Lanes lanes) const {
    return in[0].at(i, lanes);
  }
  template <class Lanes>
  INLINE_MEMBER Pair at(int64_t i, Lanes lanes) const {
    vf a = in[0].at(i, lanes), b = a, c = a;
    if constexpr (inputs > 1) b = in[1].at(i, lanes);
    if constexpr (inputs > 2) c = in[2].at(i, lanes);
    return combine<T, O>(a, b, c);
  }
  template <int64_t N>
  INLINE_MEMBER void ahead(int64_t i) const {
#pragma GCC unroll 3
    for (int k = 0; k < inputs; ++k) in[k].template ahead<N>(i);
  }
};

// 32 of them in bfloat16
template <class E, class T>
INLINE void put_pair(vf a, vf b, T* y, bool past_caches) {
  const auto v = E::apart ? blend(a, b, E::ties_even) : pack(a, b, E::ties_even);
  if (past_caches)
    stream_pair(y, v);
  else
    store_pair(y, v);
}
template <class T, class E>
INLINE void emit_pair(const E& e, T* y, int64_t i, bool past_caches) {
  if constexpr (E::apart)
    put_pair<E>(e.at(i, Even{}).first, e.at(i, Odd{}).first, y + i, past_caches);
  else
    put_pair<E>(e.at(i, All{}).first, e.at(i + W, All{}).first, y + i, past_caches);
}

constexpr int AT_ONCE = 4;  // vectors that an activation takes at once
template <class T, class E>
INLINE void read_group(const E& e, int64_t i, vf (&v)[AT_ONCE]) {
#pragma GCC unroll 4
  for (int k = 0; k < AT_ONCE; ++k) {
    if constexpr (!E::apart)
      v[k] = e.before(i + k * W, All{});
    else if (k % 2)
      v[k] = e.before(i + (k - 1) * W, Odd{});
    else
      v[k] = e.before(i + k * W, Even{});
  }
}
// Groups from i on while another group follows; where it stopped. float16 is read a group ahead: widening is 14 of a
// chain's 50 cycles.
template <class T, class E>
INLINE int64_t emit_groups(const E& e, T* y, int64_t i, int64_t n, bool past_caches, int64_t run) {
  constexpr int64_t STEP = AT_ONCE * W;
  constexpr bool early = Is<T, f16>;
  vf next[AT_ONCE], v[AT_ONCE];
  if (i + 2 * STEP > n) return i;
  if (early) read_group<T>(e, i, next);
  for (; i + 2 * STEP <= n; i += STEP) {
    if (i + AHEAD + STEP <= run) e.template ahead<STEP>(i);
    if (early) {
#pragma GCC unroll 4
      for (int k = 0; k < AT_ONCE; ++k) v[k] = next[k];
      read_group<T>(e, i + STEP, next);
    } else {
      read_group<T>(e, i, v);
    }
    activate_all<T, E::last>(v);
#pragma GCC unroll 4
    for (int k = 0; k < AT_ONCE; ++k) {
      if constexpr (bf16_in_pairs && Is<T, bf16>) {
        if (k % 2) put_pair<E>(v[k - 1], v[k], y + i + (k - 1) * W, past_caches);
      } else if (past_caches) {
        stream(y + i + k * W, v[k]);
      } else {
        store(y + i + k * W, v[k], All{});
      }
    }
  }
  return i;
}

// y[i] = e.at(i), i < n; y and z may be inputs. Iterations are independent: the processor overlaps
// them by itself. `run` elements lie in memory as the n do, and this thread comes to them in turn;
// with 0 none is asked for ahead.
template <class T, class E>
INLINE void emit(const E& e, T* y, T* z, int64_t n, bool past_caches, int64_t run) {
  int64_t i = 0;
  past_caches &= reinterpret_cast<uintptr_t>(y) % 64 == 0;
  constexpr int64_t LINE = 64 / sizeof(T);
  if constexpr (grouped<T, E::last> && E::outputs == 1) i = emit_groups(e, y, i, n, past_caches, run);
  auto line = [&](int64_t from) __attribute__((always_inline)) {
    if constexpr (bf16_in_pairs && Is<T, bf16> && E::outputs == 1) {
      emit_pair(e, y, from, past_caches);
      return;
    }
#pragma GCC unroll 4
    for (int64_t j = from; j < from + LINE; j += W) {
      Pair v = e.at(j, All{});
      if (past_caches)
        stream(y + j, v.first);
      else
        store(y + j, v.first, All{});
      if constexpr (E::outputs > 1) store(z + j, v.second, All{});
    }
  };
  for (const int64_t stop = n < run - AHEAD ? n : run - AHEAD; i + LINE <= stop; i += LINE) {
    e.template ahead<LINE>(i);
    line(i);
  }
  for (; i + LINE <= n; i += LINE) line(i);
  if constexpr (bf16_in_pairs && Is<T, bf16> && E::outputs == 1) {
    for (; i + 2 * W <= n; i += 2 * W) {
      emit_pair(e, y, i, past_caches);
    }
  }
  for (; i + W <= n; i += W) {
    Pair v = e.at(i, All{});
    if (past_caches)
      stream(y + i, v.first);
    else
      store(y + i, v.first, All{});
    if constexpr (E::outputs > 1) store(z + i, v.second, All{});
  }
  if (i < n) {
    Some lanes{n - i};
    Pair v = e.at(i, lanes);
    store(y + i, v.first, lanes);
    if constexpr (E::outputs > 1) store(z + i, v.second, lanes);
  }
  if (past_caches) fence();
}

template <class T>
struct Repeated {
  T values[2 * W];
  Source<T> of(const T* p) {
    for (T& v : values) v = *p;
    return {values, 0};
  }
};

template <class T, Elementwise O>
static void elementwise_run(const ElementwiseCall& call, int64_t begin, int64_t end) {
  T* y = static_cast<T*>(call.out[0]);
  T* z = static_cast<T*>(call.out[1]);
  bool by_rows = false;
  Formula<T, O> formula{};
  Repeated<T> one[3];
  for (int k = 0; k < formula.inputs; ++k) {
    const T* p = static_cast<const T*>(call.in[k].data);
    if (call.in[k].mode == Mode::one) formula.in[k] = one[k].of(p);
    if (call.in[k].mode == Mode::full) formula.in[k] = {p + begin, -1};
    by_rows |= call.in[k].mode == Mode::row || call.in[k].mode == Mode::column;
  }
  if (!by_rows) {
    const int64_t run = call.near ? 0 : end - begin;
    emit(formula, y + begin, z + begin, end - begin, call.stream && formula.outputs == 1, run);
    return;
  }
  for (int64_t at = begin; at < end;) {
    int64_t row = at / call.cols, col = at - row * call.cols;
    int64_t n = call.cols - col < end - at ? call.cols - col : end - at;
    for (int k = 0; k < formula.inputs; ++k) {
      const T* p = static_cast<const T*>(call.in[k].data);
      if (call.in[k].mode == Mode::full) formula.in[k] = {p + at, -1};
      if (call.in[k].mode == Mode::row) formula.in[k] = {p + col, -1, 0};
      if (call.in[k].mode == Mode::column) formula.in[k] = one[k].of(p + row);
    }
    emit(formula, y + at, z + at, n, call.stream && formula.outputs == 1, call.near ? 0 : end - at);
    at += n;
  }
}

template <class T>
static void elementwise_of(const ElementwiseCall& call, int64_t begin, int64_t end) {
  using E = Elementwise;
#define CASE(op) \
  case E::op: return elementwise_run<T, E::op>(call, begin, end);
  switch (call.op) {
    CASE(add)
    CASE(sub) CASE(mul) CASE(div) CASE(add_relu) CASE(mul_relu) CASE(affine) CASE(neg) CASE(relu)
        CASE(gelu) CASE(gelu_tanh) CASE(silu) CASE(relu_bwd) CASE(gelu_bwd) CASE(gelu_tanh_bwd)
            CASE(silu_bwd) CASE(mul_bwd) CASE(mul_relu_bwd) CASE(div_bwd)
  }
#undef CASE
}

static void elementwise(const ElementwiseCall& call, int64_t begin, int64_t end) {
  DISPATCH(call.dtype, T, elementwise_of<T>(call, begin, end))
}

template <class S>
struct Convert {
  static constexpr int outputs = 1;
  static constexpr bool ties_even = true, apart = false;
  static constexpr Activation last = Activation::none;
  Source<S> x;
  template <class Lanes>
  INLINE_MEMBER Pair at(int64_t i, Lanes lanes) const {
    vf v = x.at(i, lanes);
    return {v, v};
  }
  template <int64_t N>
  INLINE_MEMBER void ahead(int64_t i) const {
    x.template ahead<N>(i);
  }
};

static void convert(DType from, DType to, const void* x, void* y, int64_t n, bool past_caches) {
  DISPATCH(from, S, DISPATCH(to, T, {
             T* out = static_cast<T*>(y);
             emit(Convert<S>{{static_cast<const S*>(x), -1}}, out, out, n, past_caches, n);
           }))
}

template <class A, class T, Activation F>
struct Epilogue {
  static constexpr int outputs = 2;
  static constexpr bool ties_even = F <= Activation::relu || !Is<A, T>;
  static constexpr bool apart = Is<A, bf16> && Is<T, bf16>;
  static constexpr Activation last = F;
  Source<A> acc;
  Source<T> bias, residual;
  bool has_bias, has_residual;
  template <class Lanes>
  INLINE_MEMBER vf before(int64_t i, Lanes lanes) const {
    vf v = acc.at(i, lanes);
    if (has_bias) v = v + bias.at(i, lanes);
    if (has_residual) v = v + residual.at(i, lanes);
    return v;
  }
  template <class Lanes>
  INLINE_MEMBER Pair at(int64_t i, Lanes lanes) const {
    const vf v = before(i, lanes);
    return {activate<T, F>(v), v};
  }
  template <int64_t N>
  INLINE_MEMBER void ahead(int64_t i) const {
    acc.template ahead<N>(i);
    if (has_residual) residual.template ahead<N>(i);
  }
};

template <class E>
struct FirstOnly {
  static constexpr int outputs = 1;
  static constexpr bool ties_even = E::ties_even, apart = E::apart;
  static constexpr Activation last = E::last;
  const E& e;
  template <class Lanes>
  INLINE_MEMBER vf before(int64_t i, Lanes lanes) const {
    return e.before(i, lanes);
  }
  template <class Lanes>
  INLINE_MEMBER Pair at(int64_t i, Lanes lanes) const {
    return e.at(i, lanes);
  }
  template <int64_t N>
  INLINE_MEMBER void ahead(int64_t i) const {
    e.template ahead<N>(i);
  }
};

template <class A, class T, Activation F>
static void epilogue_rows(const EpilogueCall& call, int64_t begin, int64_t end) {
  const A* acc = static_cast<const A*>(call.acc);
  const T* bias = static_cast<const T*>(call.bias);
  const T* residual = static_cast<const T*>(call.residual);
  T* y = static_cast<T*>(call.y);
  T* pre = static_cast<T*>(call.pre);
  int64_t step = bias ? call.cols : end - begin;  // without a bias the rows are one run
  for (int64_t at = begin, col = begin % call.cols; at < end; col = 0) {
    int64_t n = bias ? call.cols - col : step;
    n = n < end - at ? n : end - at;
    Epilogue<A, T, F> e{{acc + at, -1},
                        {bias + col, -1},
                        {residual + at, -1},
                        bias != nullptr,
                        residual != nullptr};
    if (pre)
      emit(e, y + at, pre + at, n, false, end - at);
    else
      emit(FirstOnly<Epilogue<A, T, F>>{e}, y + at, y + at, n, call.stream, end - at);
    at += n;
  }
}

template <class A, class T>
static void epilogue_of(const EpilogueCall& call, int64_t begin, int64_t end) {
  switch (call.activation) {
    case Activation::none: return epilogue_rows<A, T, Activation::none>(call, begin, end);
    case Activation::relu: return epilogue_rows<A, T, Activation::relu>(call, begin, end);
    case Activation::gelu: return epilogue_rows<A, T, Activation::gelu>(call, begin, end);
    case Activation::gelu_tanh: return epilogue_rows<A, T, Activation::gelu_tanh>(call, begin, end);
    case Activation::silu: return epilogue_rows<A, T, Activation::silu>(call, begin, end);
  }
}

static void epilogue(const EpilogueCall& call, int64_t begin, int64_t end) {
  DISPATCH(call.dtype, T, {
    if (call.acc_dtype == DType::f32)
      epilogue_of<float, T>(call, begin, end);
    else
      epilogue_of<T, T>(call, begin, end);
  })
}

}  // namespace tensorlogic::TENSORLOGIC_ISA
