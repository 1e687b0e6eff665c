// The seam to PyTorch's stable ABI: borrowed views of arguments, pooled outputs, boxing, its thread
// pool.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "undispatched.h"
#include "kernels.h"

namespace tensorlogic {

// Throws what Python sees as RuntimeError.
[[noreturn]] void fail(const std::string& message);

struct Shape {
  const int64_t* sizes;
  int64_t dim;
  int64_t numel() const;
  bool operator==(const Shape& other) const;
  std::string text() const;
};

int32_t code_of(DType dtype);  // PyTorch's number for it
DType dtype_of(int32_t code, const char* op,
               const char* name);  // fails unless float16, bfloat16 or float32

// An argument: borrows the tensor's memory, and owns its handle unless that is borrowed, too.
class Input {
 public:
  explicit Input(AtenTensorHandle handle, bool owned = true);
  Input(Input&& other) noexcept;
  Input(const Input&) = delete;
  Input& operator=(Input&&) = delete;
  ~Input();

  DType dtype(const char* op, const char* name) const { return dtype_of(code, op, name); }
  // Fails unless contiguous, on the CPU, and (where given) of this element type.
  void check(const char* op, const char* name) const;
  void check(const char* op, const char* name, int32_t wanted) const;
  int64_t cols() const { return shape.dim ? shape.sizes[shape.dim - 1] : 1; }

  AtenTensorHandle handle;  // null where borrowed
  void* data = nullptr;
  Shape shape{nullptr, 0};
  const int64_t* strides = nullptr;
  int64_t numel = 0;
  int32_t code = -1;
  bool contiguous = false;
};
using Maybe = std::optional<Input>;

// A new contiguous tensor: from the pool where it is large, from PyTorch where it is small. Freed
// unless returned.
class Output {
 public:
  Output() = default;
  Output(Output&& other) noexcept
      : data(other.data), handle(std::exchange(other.handle, nullptr)) {}
  Output& operator=(Output&&) = delete;
  ~Output();
  AtenTensorHandle release() { return std::exchange(handle, nullptr); }

  void* data = nullptr;

 private:
  friend Output make(int32_t code, Shape shape, bool zero);
  AtenTensorHandle handle = nullptr;
};
Output make(int32_t code, Shape shape, bool zero = false);
inline Output make(DType dtype, Shape shape) { return make(code_of(dtype), shape); }

// How an output is stored. Past the caches, what it overwrites is not read, but who reads it next gets it from memory. By size: past
// them where it would not stay there anyway.
enum : int64_t { BY_SIZE, USUAL, PAST_CACHES, NEAR };  // NEAR: as usual, and inputs are not asked for ahead
bool past_caches(int64_t bytes, int64_t stores = BY_SIZE);  // fails where `stores` is none of them
bool near_by(int64_t bytes, int64_t stores);  // whether a cache has so many that are read and written, as a rule

// f(begin, end) over [0, n) on PyTorch's threads, in pieces of at least `grain`, their borders
// multiples of `unit`.
template <class F>
void parallel(int64_t n, int64_t grain, int64_t unit, const F& f) {
  if (n <= 0) return;
  if (n <= grain) return f(int64_t{0}, n);
  struct Context {
    const F& f;
    int64_t n, unit;
  } context{f, n, unit};
  auto piece = [](int64_t begin, int64_t end, void* p) {
    const Context& c = *static_cast<const Context*>(p);
    c.f(begin * c.unit, end * c.unit < c.n ? end * c.unit : c.n);
  };
  const int64_t units = (n + unit - 1) / unit, least = grain / unit;
  if (torch_parallel_for(0, units, least > 1 ? least : 1, piece, &context) != TORCH_SUCCESS)
    fail("PyTorch's parallel_for failed");
}
constexpr int64_t UNIT = 1024;  // elements: whole vectors and cache lines of every type

namespace boxing {

template <class T>
struct Unbox {
  static T from(StableIValue v) { return torch::stable::detail::to<T>(v); }
};
template <>
struct Unbox<const Input&> {
  static Input from(StableIValue v) {
    return Input(torch::stable::detail::to<AtenTensorHandle>(v));
  }
};
template <>
struct Unbox<const Maybe&> {
  static Maybe from(StableIValue v) {
    auto* inner = torch::stable::detail::to<StableIValue*>(v);
    if (!inner) return std::nullopt;
    AtenTensorHandle handle = torch::stable::detail::to<AtenTensorHandle>(*inner);
    delete inner;
    return Maybe(std::in_place, handle);
  }
};

inline StableIValue box(Output& o) { return torch::stable::detail::from(o.release()); }
template <class T>
StableIValue box(T& v) {
  return torch::stable::detail::from(v);
}
template <class T>
void push(StableIValue* stack, T&& result) {
  stack[0] = box(result);
}
template <class... T>
void push(StableIValue* stack, std::tuple<T...>&& results) {
  int i = 0;
  std::apply([&](auto&... r) { ((stack[i++] = box(r)), ...); }, results);
}

template <auto F>
struct Boxed;
template <class R, class... A, R (*F)(A...)>
struct Boxed<F> {
  template <size_t... I>
  static void run(StableIValue* stack, std::index_sequence<I...>) {
    auto args = std::tuple<decltype(Unbox<A>::from(0))...>{Unbox<A>::from(stack[I])...};
    if constexpr (std::is_void_v<R>)
      F(std::get<I>(args)...);
    else
      push(stack, F(std::get<I>(args)...));
  }
  static void call(StableIValue* stack, uint64_t, uint64_t) {
    run(stack, std::index_sequence_for<A...>{});
  }
};

}  // namespace boxing

#define BOXED(f) (&tensorlogic::boxing::Boxed<&f>::call)

// The same without boxes, for callers that are past the dispatcher (undispatched.h).
namespace directly {

template <class T>
struct Take;
template <>
struct Take<const Input&> {
  static constexpr char kind = 't';
  static Input from(const Argument& a) { return Input(a.tensor, false); }
};
template <>
struct Take<const Maybe&> {
  static constexpr char kind = 'o';
  static Maybe from(const Argument& a) {
    return a.tensor ? Maybe(std::in_place, a.tensor, false) : std::nullopt;
  }
};
template <>
struct Take<int64_t> {
  static constexpr char kind = 'i';
  static int64_t from(const Argument& a) { return a.integer; }
};
template <>
struct Take<bool> {
  static constexpr char kind = 'b';
  static bool from(const Argument& a) { return a.integer != 0; }
};
template <>
struct Take<double> {
  static constexpr char kind = 'd';
  static double from(const Argument& a) { return a.real; }
};
template <>
struct Take<int32_t> {
  static constexpr char kind = 'c';
  static int32_t from(const Argument& a) { return static_cast<int32_t>(a.integer); }
};

inline void push(AtenTensorHandle* out, Output&& result) { *out = result.release(); }
template <class... T>
void push(AtenTensorHandle* out, std::tuple<T...>&& results) {
  std::apply([&](auto&... r) { ((*out++ = r.release()), ...); }, results);
}

template <class R>
constexpr int count = 1;
template <>
inline constexpr int count<void> = 0;
template <class... T>
inline constexpr int count<std::tuple<T...>> = sizeof...(T);

template <auto F>
struct Unboxed;
template <class R, class... A, R (*F)(A...)>
struct Unboxed<F> {
  static constexpr char kinds[] = {Take<A>::kind..., 0};
  template <size_t... I>
  static void run(const Argument* in, AtenTensorHandle* out, std::index_sequence<I...>) {
    auto args = std::tuple<decltype(Take<A>::from(*in))...>{Take<A>::from(in[I])...};
    if constexpr (std::is_void_v<R>)
      F(std::get<I>(args)...);
    else
      push(out, F(std::get<I>(args)...));
  }
  static void call(const Argument* in, AtenTensorHandle* out) {
    run(in, out, std::index_sequence_for<A...>{});
  }
  static constexpr Direct entry{kinds, count<R>, &call};
};

}  // namespace directly

// Registers a kernel with PyTorch, and by its name for direct calls.
void offer(const char* name, const Direct* entry);
#define IMPLEMENT(f)                \
  m.impl(#f, BOXED(ops::f)); \
  offer(#f, &directly::Unboxed<&ops::f>::entry);

}  // namespace tensorlogic
