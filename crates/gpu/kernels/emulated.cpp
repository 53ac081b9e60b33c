// Runs the kernels of code.cu on the processor: tests/emulated.rs compares what they make with the code of penstock-raid.
//
// Standard input: words of 32 bits, little-endian: kernel (0 encode_powers, 1 encode_products, 2 verify_powers,
// 3 verify_products, 4 crc32c_blocks, 5 solve_powers with the strips 1 and on lost), rows, k, stripes, bytes of a strip, words in the table; the table (products, or the
// four of the CRC and x^(32 (32 - l)) for each lane, and the CRC of a block of zeros); then the sources of each stripe, one
// after the other, and for verification and solving their parity. Standard output: the outputs, or a word for each stripe, or the
// checksums.
#define PENSTOCK_EMULATED
#include "code.cu"

#include <cstdio>
#include <cstdlib>
#include <vector>

static void read_all(void *to, size_t bytes) {
    if (fread(to, 1, bytes, stdin) != bytes) {
        fprintf(stderr, "the input ends too early\n");
        exit(1);
    }
}

typedef std::vector<Column> Strip;

template <typename Run> static void for_threads(u32 stripes, u64 columns, Run run) {
    const u32 threads = 64;
    blockDim = {threads, 1};
    for (u32 y = 0; y < stripes; y++) {
        for (u64 x = 0; x < (columns + threads - 1) / threads; x++) {
            for (u32 thread = 0; thread < threads; thread++) {
                blockIdx = {(unsigned)x, y};
                threadIdx = {thread, 0};
                run();
            }
        }
    }
}

#define BY_ROWS(rows, name, ...)                                                                                       \
    switch (rows) {                                                                                                    \
    case 1: name##_1(__VA_ARGS__); break;                                                                              \
    case 2: name##_2(__VA_ARGS__); break;                                                                              \
    case 3: name##_3(__VA_ARGS__); break;                                                                              \
    default: exit(2);                                                                                                  \
    }

#define BY_MORE_ROWS(rows, name, ...)                                                                                  \
    if (rows == 4) {                                                                                                   \
        name##_4(__VA_ARGS__);                                                                                         \
    } else {                                                                                                           \
        BY_ROWS(rows, name, __VA_ARGS__)                                                                               \
    }

// The warp's tree, as crc32c_blocks has it.
static u32 warp_crc(const u32 *words, const u32 *table) {
    u32 lanes[WARP];
    for (u32 lane = 0; lane < WARP; lane++) {
        lanes[lane] = multiply_remainders(lane_crc(words, lane, table), table[1024 + lane]);
    }
    for (u32 half = WARP / 2; half > 0; half /= 2) {
        for (u32 lane = 0; lane < half; lane++) {
            lanes[lane] ^= lanes[lane + half];
        }
    }
    return lanes[0] ^ table[1024 + WARP];
}

int main() {
    u32 head[6];
    read_all(head, sizeof head);
    const u32 kernel = head[0], rows = head[1], k = head[2], stripes = head[3], strip_bytes = head[4];
    const u64 columns = strip_bytes / sizeof(Column);
    std::vector<u32> table(head[5]);
    read_all(table.data(), table.size() * sizeof(u32));
    const bool has_parity = kernel == 2 || kernel == 3 || kernel == 5;
    std::vector<Strip> sources(stripes * k, Strip(columns)), outputs(stripes * rows, Strip(columns));
    for (Strip &strip : sources) {
        read_all(strip.data(), strip_bytes);
    }
    std::vector<Strip> made(stripes * rows, Strip(columns));
    if (has_parity) {
        for (Strip &strip : outputs) {
            read_all(strip.data(), strip_bytes);
        }
    }
    std::vector<const Column *> from;
    for (const Strip &strip : sources) {
        from.push_back(strip.data());
    }
    std::vector<Column *> to;
    std::vector<const Column *> parity;
    for (Strip &strip : outputs) {
        to.push_back(strip.data());
        parity.push_back(strip.data());
    }
    std::vector<u32> words(kernel == 4 ? sources.size() * strip_bytes / 4096 : stripes);
    switch (kernel) {
    case 0:
        for_threads(stripes, columns, [&] { BY_ROWS(rows, encode_powers, from.data(), to.data(), k, columns) });
        break;
    case 1:
        for_threads(stripes, columns,
                    [&] { BY_MORE_ROWS(rows, encode_products, from.data(), to.data(), table.data(), k, columns) });
        break;
    case 2:
        for_threads(stripes, columns,
                    [&] { BY_ROWS(rows, verify_powers, from.data(), parity.data(), words.data(), k, columns) });
        break;
    case 3:
        for_threads(stripes, columns, [&] {
            BY_MORE_ROWS(rows, verify_products, from.data(), parity.data(), table.data(), words.data(), k, columns)
        });
        break;
    case 4:
        for (size_t strip = 0; strip < sources.size(); strip++) {
            for (u32 block = 0; block < strip_bytes / 4096; block++) {
                const u32 *at = (const u32 *)sources[strip].data() + block * BLOCK_WORDS;
                words[strip * (strip_bytes / 4096) + block] = warp_crc(at, table.data());
            }
        }
        break;
    case 5: {
        std::vector<Column *> lost;
        for (Strip &strip : made) {
            lost.push_back(strip.data());
        }
        for (u32 stripe = 0; stripe < stripes; stripe++) {
            for (u32 row = 0; row < rows; row++) {
                from[stripe * k + 1 + row] = 0;
            }
        }
        for_threads(stripes, columns, [&] {
            if (rows == 2) {
                solve_powers_2(from.data(), parity.data(), lost.data(), table.data(), k, columns);
            } else {
                solve_powers_3(from.data(), parity.data(), lost.data(), table.data(), k, columns);
            }
        });
        outputs.swap(made);
        break;
    }
    default:
        return 2;
    }
    if (kernel >= 2 && kernel <= 4) {
        fwrite(words.data(), sizeof(u32), words.size(), stdout);
    } else {
        for (const Strip &strip : outputs) {
            fwrite(strip.data(), 1, strip_bytes, stdout);
        }
    }
    return 0;
}
