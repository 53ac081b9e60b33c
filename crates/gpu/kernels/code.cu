// The erasure code and CRC32C of 4 KiB blocks for data in GPU memory: the bytes of docs/format/code.md.
//
// One thread makes a column of 16 bytes of all outputs: sources are read once, coalesced, and sums stay in registers.
// Strips are whole columns. `x` of the grid goes over columns, `y` over stripes.
//
// Pointers: source j of stripe s is sources[s * k + j]; output i is outputs[s * rows + i].
//
// Also compiled for the processor, by tests/emulated.rs, with PENSTOCK_EMULATED: threads are then a loop.

#ifdef PENSTOCK_EMULATED
#include "emulated.h"
#endif

typedef unsigned int u32;
typedef unsigned long long u64;

#define POLYNOMIAL 0x1d1d1d1du
#define CRC_POLYNOMIAL 0x82f63b78u

struct __align__(16) Column {
    u32 words[4];
};

// Every byte with its highest bit set becomes 0xff, every other 0.
__device__ __forceinline__ u32 spread_high(u32 x) {
#ifdef PENSTOCK_EMULATED
    return ((x >> 7) & 0x01010101u) * 0xffu;
#else
    u32 mask;
    asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(mask) : "r"(x));
    return mask;
#endif
}

// Four bytes times 2.
__device__ __forceinline__ u32 times_two(u32 x) {
    return ((x << 1) & 0xfefefefeu) ^ (spread_high(x) & POLYNOMIAL);
}

// Streamed: what is coded is read once and written once.
__device__ __forceinline__ Column load(const Column *from) {
#ifdef PENSTOCK_EMULATED
    return *from;
#else
    uint4 value = __ldcs((const uint4 *)from);
    Column column = {{value.x, value.y, value.z, value.w}};
    return column;
#endif
}

__device__ __forceinline__ void store(Column *to, const Column &column) {
#ifdef PENSTOCK_EMULATED
    *to = column;
#else
    __stcs((uint4 *)to, make_uint4(column.words[0], column.words[1], column.words[2], column.words[3]));
#endif
}

// Row r is the sum of 2^(r j) times source j, by Horner's rule from the last source on. A source without a pointer is zeros.
template <int ROWS>
__device__ __forceinline__ void sum_powers(Column (&sums)[ROWS], const Column *const *sources, u32 k, u64 column) {
#pragma unroll 4
    for (u32 j = k; j-- > 0;) {
        Column value = {};
        if (sources[j] != 0) {
            value = load(sources[j] + column);
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
#pragma unroll
            for (int word = 0; word < 4; word++) {
                u32 sum = sums[row].words[word];
#pragma unroll
                for (int power = 0; power < row; power++) {
                    sum = times_two(sum);
                }
                sums[row].words[word] = sum ^ value.words[word];
            }
        }
    }
}

// Adds any coefficient times source j to each row: bit by bit of the source, each bit brings the coefficient times 2^bit
// wherever it is set. products[(r k + j) 8 + bit] has that in each of its four bytes.
template <int ROWS>
__device__ __forceinline__ void add_products(
    Column (&sums)[ROWS], const Column &value, const u32 *products, u32 k, u32 j) {
#pragma unroll 2
    for (int bit = 0; bit < 8; bit++) {
        u32 masks[4];
#pragma unroll
        for (int word = 0; word < 4; word++) {
            masks[word] = spread_high(value.words[word] << (7 - bit));
        }
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            u32 product = products[(row * k + j) * 8 + bit];
#pragma unroll
            for (int word = 0; word < 4; word++) {
                sums[row].words[word] ^= masks[word] & product;
            }
        }
    }
}

template <int ROWS>
__device__ __forceinline__ void sum_products(
    Column (&sums)[ROWS], const Column *const *sources, const u32 *products, u32 k, u64 column) {
    for (u32 j = 0; j < k; j++) {
        add_products<ROWS>(sums, load(sources[j] + column), products, k, j);
    }
}

// The rows of one column: by powers without products, else by those.
template <int ROWS>
__device__ __forceinline__ void sum_rows(
    Column (&sums)[ROWS], const Column *const *sources, const u32 *products, u32 k, u64 column) {
    if (products == 0) {
        sum_powers<ROWS>(sums, sources, k, column);
    } else {
        sum_products<ROWS>(sums, sources, products, k, column);
    }
}

template <int ROWS>
__device__ __forceinline__ void make(
    const Column *const *sources, Column *const *outputs, const u32 *products, u32 k, u64 columns) {
    u64 column = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) {
        return;
    }
    Column sums[ROWS] = {};
    sum_rows<ROWS>(sums, sources + (u64)blockIdx.y * k, products, k, column);
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        store(outputs[(u64)blockIdx.y * ROWS + row] + column, sums[row]);
    }
}

// Makes ROWS lost data strips from the others and the first ROWS parity strips. What the sums of the others lack of parity
// is what the lost strips bring; the inverse of their coefficients, in `products`, solves for them. So the many sources
// take Horner's rule, and only as many products as strips are lost go bit by bit.
template <int ROWS>
__device__ __forceinline__ void solve(
    const Column *const *sources, const Column *const *parity, Column *const *outputs, const u32 *products, u32 k,
    u64 columns) {
    u64 column = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) {
        return;
    }
    Column lacking[ROWS] = {};
    sum_powers<ROWS>(lacking, sources + (u64)blockIdx.y * k, k, column);
    Column made[ROWS] = {};
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        Column found = load(parity[(u64)blockIdx.y * ROWS + row] + column);
#pragma unroll
        for (int word = 0; word < 4; word++) {
            lacking[row].words[word] ^= found.words[word];
        }
        add_products<ROWS>(made, lacking[row], products, ROWS, row);
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        store(outputs[(u64)blockIdx.y * ROWS + row] + column, made[row]);
    }
}

// Sets bit `row` of disagreements[stripe] where a column of parity is not what it should be.
template <int ROWS>
__device__ __forceinline__ void compare(
    const Column *const *sources, const Column *const *parity, const u32 *products, u32 *disagreements, u32 k,
    u64 columns) {
    u64 column = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) {
        return;
    }
    Column sums[ROWS] = {};
    sum_rows<ROWS>(sums, sources + (u64)blockIdx.y * k, products, k, column);
    u32 wrong = 0;
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        Column found = load(parity[(u64)blockIdx.y * ROWS + row] + column);
#pragma unroll
        for (int word = 0; word < 4; word++) {
            wrong |= (found.words[word] != sums[row].words[word]) << row;
        }
    }
    if (wrong != 0) {
        atomicOr(&disagreements[blockIdx.y], wrong);
    }
}

// Powers: row r has the coefficients 2^(r j). Products: any coefficients, from a table.
#define POWERS_KERNELS(ROWS)                                                                                           \
    extern "C" __global__ void encode_powers_##ROWS(                                                                   \
        const Column *const *sources, Column *const *outputs, u32 k, u64 columns) {                                    \
        make<ROWS>(sources, outputs, 0, k, columns);                                                                   \
    }                                                                                                                  \
    extern "C" __global__ void verify_powers_##ROWS(                                                                   \
        const Column *const *sources, const Column *const *parity, u32 *disagreements, u32 k, u64 columns) {           \
        compare<ROWS>(sources, parity, 0, disagreements, k, columns);                                                  \
    }

#define PRODUCTS_KERNELS(ROWS)                                                                                         \
    extern "C" __global__ void encode_products_##ROWS(                                                                 \
        const Column *const *sources, Column *const *outputs, const u32 *products, u32 k, u64 columns) {               \
        make<ROWS>(sources, outputs, products, k, columns);                                                            \
    }                                                                                                                  \
    extern "C" __global__ void verify_products_##ROWS(                                                                 \
        const Column *const *sources, const Column *const *parity, const u32 *products, u32 *disagreements, u32 k,     \
        u64 columns) {                                                                                                 \
        compare<ROWS>(sources, parity, products, disagreements, k, columns);                                           \
    }

#define SOLVE_KERNELS(ROWS)                                                                                            \
    extern "C" __global__ void solve_powers_##ROWS(                                                                    \
        const Column *const *sources, const Column *const *parity, Column *const *outputs, const u32 *products, u32 k, \
        u64 columns) {                                                                                                 \
        solve<ROWS>(sources, parity, outputs, products, k, columns);                                                   \
    }

POWERS_KERNELS(1)
POWERS_KERNELS(2)
POWERS_KERNELS(3)
SOLVE_KERNELS(2)
SOLVE_KERNELS(3)
PRODUCTS_KERNELS(1)
PRODUCTS_KERNELS(2)
PRODUCTS_KERNELS(3)
PRODUCTS_KERNELS(4)

// CRC32C of blocks of 4 KiB, a warp for each. Lane l takes the words l, l + 32, l + 64 and so on, so that the warp reads
// lines; its remainder moves on by 32 words from one of its words to the next, by four look-ups in `tables`: table b
// has, for every value of byte b of a remainder, what that becomes. `lanes` has x^(32 (32 - l)): what follows the last word
// of lane l, and the 32 bits of the remainder itself.

#define BLOCK_WORDS 1024
#define WARP 32

__device__ __forceinline__ u32 move_on(u32 crc, const u32 *tables) {
    return tables[crc & 0xff] ^ tables[256 + ((crc >> 8) & 0xff)] ^ tables[512 + ((crc >> 16) & 0xff)] ^
           tables[768 + (crc >> 24)];
}

// The remainder of lane l, before what follows its last word.
__device__ __forceinline__ u32 lane_crc(const u32 *block, u32 lane, const u32 *tables) {
    u32 crc = 0;
#pragma unroll 8
    for (u32 word = lane; word < BLOCK_WORDS; word += WARP) {
        crc = move_on(crc, tables) ^ block[word];
    }
    return crc;
}

// The product of two remainders, both with reflected bits, so that x^0 is the highest one.
__device__ __forceinline__ u32 multiply_remainders(u32 a, u32 b) {
    u32 product = 0;
#pragma unroll 8
    for (int bit = 31; bit >= 0; bit--) {
        product ^= b & (0u - ((a >> bit) & 1));
        b = (b >> 1) ^ (CRC_POLYNOMIAL & (0u - (b & 1)));
    }
    return product;
}

#ifndef PENSTOCK_EMULATED
extern "C" __global__ void crc32c_blocks(
    const u32 *const *strips, u32 *crcs, const u32 *table, const u32 *lanes, u32 zero_block_crc, u32 blocks_per_strip) {
    __shared__ u32 tables[1024];
    for (u32 at = threadIdx.x; at < 1024; at += blockDim.x) {
        tables[at] = table[at];
    }
    __syncthreads();
    u32 lane = threadIdx.x % WARP;
    u32 block = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (block >= blocks_per_strip) {
        return;
    }
    const u32 *words = strips[blockIdx.y] + (u64)block * BLOCK_WORDS;
    u32 crc = multiply_remainders(lane_crc(words, lane, tables), lanes[lane]);
    for (u32 half = WARP / 2; half > 0; half /= 2) {
        crc ^= __shfl_down_sync(0xffffffffu, crc, half);
    }
    if (lane == 0) {
        crcs[(u64)blockIdx.y * blocks_per_strip + block] = crc ^ zero_block_crc;
    }
}
#endif
