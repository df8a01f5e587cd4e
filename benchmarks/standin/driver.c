/* CUDA, cuBLAS and the driver without a GPU: memory is address space that nobody touches, kernels and products return at once.
   Only what gives something back stands here; standin.py adds a function that returns 0 for everything else. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <driver_types.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define MEMORY (80ull << 30)
#define SOME ((void *)1)
typedef void *P;
typedef unsigned long long U;

static int nothing(void) { return 0; }

/* --- the device --------------------------------------------------------------------------------------------------- */

int cudaGetDeviceCount(int *n) { return *n = 1, 0; }
int cudaGetDevice(int *device) { return *device = 0, 0; }
int cudaDriverGetVersion(int *v) { return *v = 13000, 0; }
int cudaRuntimeGetVersion(int *v) { return *v = 13000, 0; }
int cudaDeviceCanAccessPeer(int *can) { return *can = 0, 0; }
int cudaDeviceGetStreamPriorityRange(int *low, int *high) { return *low = 0, *high = -5, 0; }
const char *cudaGetErrorString(int error) { return "an error of the stand-in"; }
const char *cudaGetErrorName(int error) { return "stand-in"; }

int cudaDeviceGetAttribute(int *value, int which, int device) {
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: return *value = 9, 0;
    case cudaDevAttrComputeCapabilityMinor: return *value = 0, 0;
    case cudaDevAttrMultiProcessorCount: return *value = 132, 0;
    case cudaDevAttrWarpSize: return *value = 32, 0;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return *value = 2048, 0;
    case cudaDevAttrMaxSharedMemoryPerBlock: return *value = 49152, 0;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return *value = 232448, 0;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return *value = 233472, 0;
    default: return *value = 1024, 0;
  }
}

int cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "NVIDIA H100 80GB HBM3 (stand-in)");
  p->major = 9, p->totalGlobalMem = MEMORY, p->multiProcessorCount = 132, p->warpSize = 32, p->l2CacheSize = 50 << 20;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->totalConstMem = 65536, p->textureAlignment = 512;
  p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
  return 0;
}
int cudaGetDeviceProperties_v2(struct cudaDeviceProp *p, int device) { return cudaGetDeviceProperties(p, device); }

int cudaFuncGetAttributes(struct cudaFuncAttributes *a, P function) {
  memset(a, 0, sizeof *a);
  return a->ptxVersion = a->binaryVersion = 90, a->maxThreadsPerBlock = 1024, a->numRegs = 32, 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n) { return *n = 4, 0; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n) { return *n = 4, 0; }
int cudaOccupancyMaxActiveClusters(int *n) { return *n = 1, 0; }
int cudaOccupancyAvailableDynamicSMemPerBlock(size_t *n) { return *n = 49152, 0; }
P *__cudaRegisterFatBinary(P binary) { static P handle; return &handle; }

/* --- memory ------------------------------------------------------------------------------------------------------- */

static struct { P at, mapped; size_t size; } held[1 << 17];
static int count;
static size_t used;

int cudaMalloc(P *at, size_t size) {
  const size_t aligned = 2 << 20;
  P mapped = used + size > MEMORY ? MAP_FAILED
    : mmap(0, size + aligned, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return *at = 0, cudaErrorMemoryAllocation;
  *at = (P)(((size_t)mapped + aligned - 1) / aligned * aligned);
  held[count].at = *at, held[count].mapped = mapped, held[count++].size = size, used += size;
  return 0;
}

int cudaFree(P at) {
  for (int i = count - 1; i >= 0; i--)
    if (held[i].at == at) {
      munmap(held[i].mapped, held[i].size + (2 << 20)), used -= held[i].size, held[i] = held[--count];
      break;
    }
  return 0;
}

int cudaMemGetInfo(size_t *unused, size_t *total) { return *total = MEMORY, *unused = MEMORY - used, 0; }
int cudaHostAlloc(P *at, size_t size) { return *at = calloc(1, size), 0; }
int cudaMallocHost(P *at, size_t size) { return *at = calloc(1, size), 0; }
int cudaFreeHost(P at) { return free(at), 0; }
int cudaHostGetDevicePointer(P *device, P host) { return *device = host, 0; }
int cudaPointerGetAttributes(struct cudaPointerAttributes *a, P at) {
  return memset(a, 0, sizeof *a), a->type = cudaMemoryTypeDevice, 0;
}
/* What is small may be looked at by the host; what is large stays untouched, and takes no memory here. */
int cudaMemsetAsync(P to, int value, size_t n) { return n < 1 << 20 ? memset(to, value, n), 0 : 0; }
int cudaMemcpyAsync(P to, P from, size_t n, int kind) {
  return kind != cudaMemcpyDeviceToDevice || n < 1 << 20 ? memcpy(to, from, n), 0 : 0;
}
int cudaMemcpy(P to, P from, size_t n, int kind) { return cudaMemcpyAsync(to, from, n, kind); }
int cudaGetSymbolAddress(P *at) { static char zeros[1 << 16]; return *at = zeros, 0; }

/* --- streams and graphs ------------------------------------------------------------------------------------------- */

static P capturing = (P)-1;
static U captures;

int cudaStreamCreateWithPriority(P *s) { static size_t n; return *s = (P)(100 + n++), 0; }
int cudaStreamGetPriority(P s, int *priority) { return *priority = 0, 0; }
int cudaEventCreateWithFlags(P *e) { static size_t n; return *e = (P)(100 + n++), 0; }
int cudaEventElapsedTime(float *ms) { return *ms = 1, 0; }
int cudaStreamIsCapturing(P s, int *status) { return *status = s == capturing, 0; }
int cudaStreamBeginCapture(P s) { return capturing = s, captures++, 0; }
int cudaStreamEndCapture(P s, P *graph) { return capturing = (P)-1, *graph = SOME, 0; }
int cudaStreamGetCaptureInfo(P s, int *status, U *id, P *graph, P *dependencies, P *edges, size_t *n) {
  *status = s == capturing;
  if (id) *id = captures;
  if (graph) *graph = SOME;
  if (n) *n = 0;
  return 0;
}
int cudaGraphInstantiate(P *executable) { return *executable = SOME, 0; }
int cudaGraphInstantiateWithFlags(P *executable) { return *executable = SOME, 0; }
int cudaGraphGetNodes(P graph, P *nodes, size_t *n) { return *n = 1, 0; }

/* --- cuBLAS, and the driver as PyTorch and Triton call it ---------------------------------------------------------- */

int cublasCreate_v2(P *handle) { return *handle = SOME, 0; }
int cublasLtCreate(P *handle) { return *handle = SOME, 0; }
int cublasGetMathMode(P handle, int *mode) { return *mode = 0, 0; }
int cublasGetPointerMode_v2(P handle, int *mode) { return *mode = 0, 0; }
int cublasLtMatmulDescCreate(P *made) { return *made = SOME, 0; }
int cublasLtMatrixLayoutCreate(P *made) { return *made = SOME, 0; }
int cublasLtMatmulPreferenceCreate(P *made) { return *made = SOME, 0; }
int cublasLtMatmulAlgoGetHeuristic(P h, P o, P a, P b, P c, P d, P preference, int wanted, char *found, int *n) {
  return memset(found, 0, 64), *n = 1, 0;
}

int cuDeviceGet(int *device) { return *device = 0, 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { return cudaDeviceGetAttribute(value, which, device); }
int cuDriverGetVersion(int *v) { return *v = 13000, 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
int cuDevicePrimaryCtxRetain(P *context) { return *context = SOME, 0; }
int cuCtxGetCurrent(P *context) { return *context = SOME, 0; }
int cuCtxGetDevice(int *device) { return *device = 0, 0; }
int cuCtxGetLimit(size_t *limit) { return *limit = 1 << 20, 0; }
int cuGetErrorString(int error, const char **text) { return *text = "an error of the stand-in", 0; }
int cuFuncGetAttribute(int *value) { return *value = 0, 0; }
int cuModuleLoad(P *module) { return *module = SOME, 0; }
int cuModuleLoadData(P *module) { return *module = SOME, 0; }
int cuModuleGetFunction(P *function) { return *function = SOME, 0; }
int cuOccupancyMaxActiveClusters(int *n) { return *n = 1, 0; }
int cuPointerGetAttribute(P *value, int which, P at) { return *value = at, 0; }

int cudaGetDriverEntryPointByVersion(const char *name, P *function, unsigned version, U flags, int *status) {
  P found = dlsym(RTLD_DEFAULT, name);
  *function = found ? found : (P)nothing;
  if (status) *status = 0;
  return 0;
}
