/* A libcuda.so.1 without a GPU: enough of the driver for Triton's own C code to load modules and launch. Launches are
   recorded; the process reads them through kb_launches and kb_launch_at. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int CUresult;
typedef struct {
  unsigned gridX, gridY, gridZ, blockX, blockY, blockZ, shared;
  void *stream;
  void *attrs;
  unsigned numAttrs;
} CUlaunchConfig;

enum { MAX_LAUNCHES = 4096, MAX_PARAMS = 16 };
static struct {
  uint64_t function, grid[3], block, stream, params[MAX_PARAMS];
} launches[MAX_LAUNCHES];
static int count;
static uint64_t modules;

int kb_launches(void) { return count; }
void *kb_launch_at(int index) { return &launches[index]; }

CUresult cuInit(unsigned flags) { return 0; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; return 0; }
CUresult cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
CUresult cuDeviceGetCount(int *number) { *number = 1; return 0; }
CUresult cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
CUresult cuCtxSetCurrent(void *context) { return 0; }
CUresult cuCtxGetDevice(int *device) { *device = 0; return 0; }
CUresult cuCtxSetLimit(int limit, size_t value) { return 0; }
CUresult cuCtxGetLimit(size_t *value, int limit) { *value = 0; return 0; }
CUresult cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
CUresult cuGetErrorString(CUresult code, const char **text) { *text = "stub"; return 0; }
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 232448; return 0; }
CUresult cuModuleLoadData(void **module, const void *image) { *module = (void *)++modules; return 0; }
CUresult cuModuleUnload(void *module) { return 0; }
CUresult cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = (void *)((uint64_t)module + 1000);
  return 0;
}
CUresult cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : 0; return 0; }
CUresult cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
CUresult cuFuncSetCacheConfig(void *function, int config) { return 0; }
CUresult cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
CUresult cuPointerGetAttribute(void *data, int attribute, uint64_t pointer) {
  memcpy(data, &pointer, sizeof pointer);
  return 0;
}
CUresult cuOccupancyMaxActiveClusters(int *number, void *function, const void *config) { *number = 1; return 0; }
CUresult cuTensorMapEncodeTiled(void) { return 1; }
CUresult cuTensorMapEncodeIm2col(void) { return 1; }
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, void *function, void **params, void **extra) {
  int at = count++ % MAX_LAUNCHES;
  launches[at].function = (uint64_t)function;
  launches[at].grid[0] = config->gridX;
  launches[at].grid[1] = config->gridY;
  launches[at].grid[2] = config->gridZ;
  launches[at].block = config->blockX;
  launches[at].stream = (uint64_t)config->stream;
  /* The number of parameters is not known here; the test knows it, and reads no more than that. */
  for (int i = 0; i < 4; i++)
    memcpy(&launches[at].params[i], params[i], i == 3 ? 4 : 8);
  return 0;
}
