// A stand-in for NVIDIA's driver, built against its header: notes what kernels are launched with, and runs a function in their place.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstring>

extern "C" {

// What a launch's `function` points to: the sizes of its arguments, and what to do with them, or null.
struct Kernel {
  int32_t count;
  int32_t sizes[64];
  void (*run)(void** arguments);
};
struct Launch {
  uint32_t grid[3], block[3], shared, attributes;
  uint32_t ids[4];
  int32_t values[4];
  uint64_t stream;
  uint32_t bytes;
  unsigned char arguments[2048];
};

Launch launches[64];
int launched = 0;  // also those that are not noted any more
int refuse = 0;    // the status of the next launches
int status_of_capture = 0;
uint64_t stream_of_device = 0x700;
void* context = nullptr;

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments, void**) {
  if (refuse) return static_cast<CUresult>(refuse);
  const auto& kernel = *reinterpret_cast<Kernel*>(function);
  Launch& to = launches[launched++ % 64];
  to = Launch{{config->gridDimX, config->gridDimY, config->gridDimZ},
              {config->blockDimX, config->blockDimY, config->blockDimZ},
              config->sharedMemBytes,
              config->numAttrs,
              {},
              {},
              reinterpret_cast<uint64_t>(config->hStream),
              0,
              {}};
  for (unsigned i = 0; i < config->numAttrs && i < 4; ++i) {
    to.ids[i] = config->attrs[i].id;
    to.values[i] = config->attrs[i].value.cooperative;
  }
  for (int i = 0; i < kernel.count; ++i) {
    memcpy(to.arguments + to.bytes, arguments[i], kernel.sizes[i]);
    to.bytes += kernel.sizes[i];
  }
  if (kernel.run) kernel.run(arguments);
  return CUDA_SUCCESS;
}

int current_stream(int32_t device, void** out) {
  *out = reinterpret_cast<void*>(stream_of_device + device);
  return 0;
}

CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  *status = static_cast<CUstreamCaptureStatus>(status_of_capture);
  return CUDA_SUCCESS;
}

// As much as Triton's own launcher asks for.
CUresult cuCtxGetCurrent(CUcontext* out) {
  *out = reinterpret_cast<CUcontext>(&context);
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** out) {
  *out = "the stand-in refuses";
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* out) {
  *out = 13020;
  return CUDA_SUCCESS;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t, void* address,
                                const cuuint64_t* size, const cuuint64_t*, const cuuint32_t* box,
                                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill) {
  memset(map, 0x5a, sizeof *map);
  const uint64_t words[] = {reinterpret_cast<uint64_t>(address), size[0], size[1], box[0], box[1], type};
  memcpy(map, words, sizeof words);
  return CUDA_SUCCESS;
}

// Kernels --------------------------------------------------------------------------------------

// y [n] = max(a + b, 0): pointers a, b, y, then n.
void add_relu(void** arguments) {
  const float *a = *static_cast<float**>(arguments[0]), *b = *static_cast<float**>(arguments[1]);
  float* y = *static_cast<float**>(arguments[2]);
  const int32_t n = *static_cast<int32_t*>(arguments[3]);
  for (int32_t i = 0; i < n; ++i) y[i] = a[i] + b[i] > 0 ? a[i] + b[i] : 0;
}
}
