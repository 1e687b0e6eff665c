#include "stable_abi.h"

#include <string.h>

#include <atomic>
#include <stdexcept>
#include <unordered_map>

#include "pooled_tensor.h"
#include "pool.h"

namespace tensorlogic {

void fail(const std::string& message) { throw std::runtime_error(message); }

int64_t Shape::numel() const {
  int64_t n = 1;
  for (int64_t i = 0; i < dim; ++i) n *= sizes[i];
  return n;
}

bool Shape::operator==(const Shape& other) const {
  return dim == other.dim &&
         memcmp(sizes, other.sizes, static_cast<size_t>(dim) * sizeof(int64_t)) == 0;
}

std::string Shape::text() const {
  std::string s = "[";
  for (int64_t i = 0; i < dim; ++i) s += (i ? ", " : "") + std::to_string(sizes[i]);
  return s + "]";
}

int32_t code_of(DType dtype) {
  static const int32_t codes[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_float16(),
                                  aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float64()};
  return codes[static_cast<int>(dtype)];
}

DType dtype_of(int32_t code, const char* op, const char* name) {
  for (DType t : {DType::f32, DType::f16, DType::bf16})
    if (code == code_of(t)) return t;
  fail(std::string(op) + ": " + name + " must be float16, bfloat16 or float32");
}

Input::Input(AtenTensorHandle h, bool owned) : handle(owned ? h : nullptr) {
  int64_t *sizes = nullptr, *steps = nullptr;
  const bool known = aoti_torch_get_data_ptr(h, &data) == TORCH_SUCCESS &&
                     aoti_torch_get_sizes(h, &sizes) == TORCH_SUCCESS &&
                     aoti_torch_get_strides(h, &steps) == TORCH_SUCCESS &&
                     aoti_torch_get_dim(h, &shape.dim) == TORCH_SUCCESS &&
                     aoti_torch_get_numel(h, &numel) == TORCH_SUCCESS &&
                     aoti_torch_get_dtype(h, &code) == TORCH_SUCCESS &&
                     aoti_torch_is_contiguous(h, &contiguous) == TORCH_SUCCESS;
  shape.sizes = sizes;
  strides = steps;
  contiguous &= known;
  if (known && !data && numel > 0)
    fail("a tensor of shape " + shape.text() +
         " has no memory: its storage was resized to nothing, as FSDP does with parameters between "
         "uses; bring its data back before the call");
}

Input::Input(Input&& other) noexcept
    : handle(std::exchange(other.handle, nullptr)),
      data(other.data),
      shape(other.shape),
      strides(other.strides),
      numel(other.numel),
      code(other.code),
      contiguous(other.contiguous) {}

Input::~Input() {
  if (handle) aoti_torch_delete_tensor_object(handle);
}

void Input::check(const char* op, const char* name) const {
  if (!contiguous)
    fail(std::string(op) + ": " + name + " of shape " + shape.text() +
         " must be contiguous; call .contiguous() on it");
}

void Input::check(const char* op, const char* name, int32_t wanted) const {
  check(op, name);
  if (code != wanted)
    fail(std::string(op) + ": " + name + " must have the element type of the other tensors");
}

Output::~Output() {
  if (handle) aoti_torch_delete_tensor_object(handle);
}

bool past_caches(int64_t bytes, int64_t stores) {
  if (stores < BY_SIZE || stores > NEAR)
    fail("stores must be 0 (by size), 1 (usual), 2 (past the caches) or 3 (usual, nothing asked for ahead), got " +
         std::to_string(stores));
  return stores == BY_SIZE ? bytes >= (int64_t{32} << 20) : stores == PAST_CACHES;
}

bool near_by(int64_t bytes, int64_t stores) {
  return stores == BY_SIZE ? bytes < (int64_t{8} << 20) : stores == NEAR;
}

namespace {
std::atomic<Adopt> adopt{[](void* data, void* ticket, int64_t, int64_t dim, const int64_t* sizes,
                            const int64_t* strides, int32_t code, AtenTensorHandle* out) -> int {
  const auto status =
      torch_from_blob(data, dim, sizes, strides, 0, code, aoti_torch_device_type_cpu(), -1, out,
                      aoti_torch_layout_strided(), nullptr, 0, &pool::release, ticket);
  if (status != TORCH_SUCCESS) pool::release(data, ticket);
  return status;
}};
}  // namespace

namespace {
std::unordered_map<std::string, const Direct*>& offered() {
  static std::unordered_map<std::string, const Direct*> all;
  return all;
}
}  // namespace

void offer(const char* name, const Direct* entry) { offered()[name] = entry; }

const Direct* direct(const char* name) {
  const auto found = offered().find(name);
  return found == offered().end() ? nullptr : found->second;
}

void set_adopt(Adopt better) { adopt = better; }

Output make(int32_t code, Shape shape, bool zero) {
  constexpr int64_t MOST = 64;
  if (shape.dim > MOST) fail("more than 64 dimensions");
  int64_t strides[MOST], numel = 1;
  for (int64_t i = shape.dim - 1; i >= 0; --i) {
    strides[i] = numel;
    numel *= shape.sizes[i] > 1 ? shape.sizes[i] : 1;
  }
  const int64_t bytes = shape.numel() * static_cast<int64_t>(aoti_torch_dtype_element_size(code));
  const int32_t cpu = aoti_torch_device_type_cpu();
  Output out;
  if (bytes >= pool::SMALLEST) {
    pool::Block block = pool::allocate(bytes);
    if (block.data) {
      if (adopt.load(std::memory_order_relaxed)(block.data, block.ticket, bytes, shape.dim,
                                                shape.sizes, strides, code, &out.handle))
        fail("PyTorch could not make a tensor of pooled memory");
      out.data = block.data;
      if (zero && !block.zeroed)
        parallel(bytes, 1 << 20, 1 << 16, [&](int64_t begin, int64_t end) {
          memset(static_cast<char*>(out.data) + begin, 0, static_cast<size_t>(end - begin));
        });
      return out;
    }
  }
  if (aoti_torch_empty_strided(shape.dim, shape.sizes, strides, code, cpu, -1, &out.handle) !=
      TORCH_SUCCESS)
    fail("DefaultCPUAllocator: can't allocate memory: you tried to allocate " +
         std::to_string(bytes) + " bytes.");
  aoti_torch_get_data_ptr(out.handle, &out.data);
  if (zero && bytes > 0) memset(out.data, 0, static_cast<size_t>(bytes));
  return out;
}

}  // namespace tensorlogic
