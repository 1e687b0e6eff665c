// PyTorch's CPU allocator, replaced while asked for by the pool; and pooled outputs as tensors whose
// storage can grow.
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <pthread.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>

#include <mutex>
#include <unordered_map>

#include "../pooled_tensor.h"
#include "../pool.h"
#include "hooks.h"

namespace tensorlogic::hooks {
namespace {

// From a block's address to the ticket that goes back with it: PyTorch's raw_allocate keeps nothing
// but the address.
struct Tickets {
  std::mutex mutex;
  std::unordered_map<void*, void*> of;

  void add(void* data, void* ticket) {
    std::lock_guard<std::mutex> lock(mutex);
    of.emplace(data, ticket);
  }
  bool take(void* data, void** ticket) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = of.find(data);
    if (found == of.end()) return false;
    *ticket = found->second;
    of.erase(found);
    return true;
  }
};

// Never destroyed: tensors may be freed after every destructor has run.
Tickets& tickets() {
  static Tickets& instance = *[] {
    Tickets* t = new Tickets;
    pthread_atfork([] { tickets().mutex.lock(); }, [] { tickets().mutex.unlock(); },
                   [] { tickets().mutex.unlock(); });
    return t;
  }();
  return instance;
}

void give_back(void* data) {
  void* ticket = nullptr;
  if (!data || !tickets().take(data, &ticket)) return;
  c10::profiledCPUMemoryReporter().Delete(data);
  pool::release(data, ticket);
}

c10::DataPtr owned(void* data, void* ticket, size_t bytes) {
  tickets().add(data, ticket);
  c10::profiledCPUMemoryReporter().New(data, bytes);
  return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
}

class Allocator final : public c10::Allocator {
 public:
  explicit Allocator(c10::Allocator* before) : before_(before) {}

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes >= static_cast<size_t>(pool::SMALLEST) && bytes < (size_t{1} << 47)) {
      pool::Block block = pool::allocate(static_cast<int64_t>(bytes));
      if (block.data) return owned(block.data, block.ticket, bytes);
    }
    return before_->allocate(bytes);  // its own error where there is no memory
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_raw; }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }

  static Allocator& instance() {
    static Allocator& it = *new Allocator(c10::GetDefaultCPUAllocator());
    return it;
  }

 private:
  static void free_raw(void* data) {
    void* ticket = nullptr;
    if (tickets().take(data, &ticket)) {
      c10::profiledCPUMemoryReporter().Delete(data);
      pool::release(data, ticket);
    } else {
      instance().before_->raw_deleter()(data);
    }
  }

  c10::Allocator* before_;
};

int adopt(void* data, void* ticket, int64_t bytes, int64_t dim, const int64_t* sizes,
          const int64_t* strides, int32_t code, AtenTensorHandle* out) {
  try {
    auto storage = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), bytes,
        owned(data, ticket, static_cast<size_t>(bytes)), &Allocator::instance(),
        /*resizable=*/true);
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(std::move(storage)), c10::DispatchKeySet(c10::DispatchKey::CPU),
        c10::scalarTypeToTypeMeta(static_cast<c10::ScalarType>(code)));
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
        c10::IntArrayRef(sizes, static_cast<size_t>(dim)),
        c10::IntArrayRef(strides, static_cast<size_t>(dim)));
    *out = torch::aot_inductor::new_tensor_handle(std::move(tensor));
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

const bool adopted = (set_adopt(&adopt), true);

c10::Allocator* replaced = nullptr;

}  // namespace

void pool_all(bool on) {
  if (on == (replaced != nullptr)) return;
  constexpr uint8_t PRIORITY = 255;
  if (on) {
    replaced = c10::GetCPUAllocator();
    c10::SetCPUAllocator(&Allocator::instance(), PRIORITY);
  } else {
    c10::SetCPUAllocator(replaced, PRIORITY);
    replaced = nullptr;
  }
}

bool pools_all() { return replaced != nullptr; }

}  // namespace tensorlogic::hooks
