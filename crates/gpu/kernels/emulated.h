// What code.cu takes from CUDA, for a processor: threads of a grid are a loop of the caller.
#include <cstddef>

#define __device__
#define __global__
#define __forceinline__ inline
#define __align__(bytes) alignas(bytes)

struct Place {
    unsigned x, y;
};

static Place blockIdx, blockDim, threadIdx;

static unsigned atomicOr(unsigned *to, unsigned bits) {
    unsigned before = *to;
    *to |= bits;
    return before;
}
