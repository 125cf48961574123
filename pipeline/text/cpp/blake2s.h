// BLAKE2s without a key, for a message in memory. Source: RFC 7693.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace blake2s {

constexpr size_t BLOCK = 64, MAX_DIGEST = 32;

constexpr uint32_t IV[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

constexpr uint8_t SIGMA[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

inline uint32_t load(const uint8_t* at) {
    return uint32_t(at[0]) | uint32_t(at[1]) << 8 | uint32_t(at[2]) << 16 | uint32_t(at[3]) << 24;
}

inline uint32_t rotate(uint32_t value, int bits) { return value >> bits | value << (32 - bits); }

inline void mix(uint32_t* v, int a, int b, int c, int d, uint32_t x, uint32_t y) {
    v[a] += v[b] + x;
    v[d] = rotate(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotate(v[b] ^ v[c], 12);
    v[a] += v[b] + y;
    v[d] = rotate(v[d] ^ v[a], 8);
    v[c] += v[d];
    v[b] = rotate(v[b] ^ v[c], 7);
}

// Updates the state `h` by one block, after which `total` bytes have been read.
inline void compress(uint32_t* h, const uint8_t* block, uint64_t total, bool last) {
    uint32_t v[16], m[16];
    for (int i = 0; i < 8; ++i) v[i] = h[i], v[i + 8] = IV[i];
    for (int i = 0; i < 16; ++i) m[i] = load(block + 4 * i);
    v[12] ^= uint32_t(total);
    v[13] ^= uint32_t(total >> 32);
    if (last) v[14] = ~v[14];
    for (const auto& s : SIGMA) {
        for (int i = 0; i < 4; ++i) mix(v, i, 4 + i, 8 + i, 12 + i, m[s[2 * i]], m[s[2 * i + 1]]);
        for (int i = 0; i < 4; ++i)
            mix(v, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[s[8 + 2 * i]], m[s[9 + 2 * i]]);
    }
    for (int i = 0; i < 8; ++i) h[i] ^= v[i] ^ v[i + 8];
}

// Writes the first `size` bytes (1 to MAX_DIGEST) of the digest, whose parameter block names this size.
inline void digest(const uint8_t* data, size_t length, size_t size, uint8_t* out) {
    uint32_t h[8];
    std::memcpy(h, IV, sizeof h);
    h[0] ^= 0x01010000 ^ uint32_t(size);
    size_t read = 0;
    for (; length - read > BLOCK; read += BLOCK) compress(h, data + read, read + BLOCK, false);
    uint8_t block[BLOCK] = {};
    if (length > read) std::memcpy(block, data + read, length - read);
    compress(h, block, length, true);
    for (size_t i = 0; i < size; ++i) out[i] = uint8_t(h[i / 4] >> 8 * (i % 4));
}

// Returns the digest of 8 bytes as a little-endian number: the key of a word.
inline uint64_t key(const uint8_t* data, size_t length) {
    uint8_t out[8];
    digest(data, length, sizeof out, out);
    return uint64_t(load(out)) | uint64_t(load(out + 4)) << 32;
}

}  // namespace blake2s
