// Bit splitting (arXiv 2508.03760): eight codes of k bits, one in each byte of a 64-bit word, to k packed bytes and
// back. Low codes stand in low bits (little-endian). k = 1, 2, 4 or 8.
#pragma once

#include "fc/host_device.h"

namespace fc {

// Planes of a block in their order: 8, 4, 2, 1 bits. Low code bits stand in the wider planes.
FC_FN constexpr int plane_width(int index) { return 8 >> index; }

FC_FN constexpr uint64_t byte_mask(int bits) { return 0x0101010101010101ull * ((1u << bits) - 1u); }

// Each step halves the number of fields and doubles their width.
template <int K>
FC_FN uint64_t pack8(uint64_t codes) {
  if constexpr (K == 8) {
    return codes;
  } else {
    constexpr uint64_t pair = (1ull << (2 * K)) - 1, four = (1ull << (4 * K)) - 1, eight = (1ull << (8 * K)) - 1;
    uint64_t v = codes & byte_mask(K);
    v = (v | (v >> (8 - K))) & (pair * 0x0001000100010001ull);
    v = (v | (v >> (16 - 2 * K))) & (four * 0x0000000100000001ull);
    return (v | (v >> (32 - 4 * K))) & eight;
  }
}

template <int K>
FC_FN uint64_t unpack8(uint64_t packed) {
  if constexpr (K == 8) {
    return packed;
  } else {
    constexpr uint64_t pair = (1ull << (2 * K)) - 1, four = (1ull << (4 * K)) - 1;
    uint64_t v = packed;
    v = (v | (v << (32 - 4 * K))) & (four * 0x0000000100000001ull);
    v = (v | (v << (16 - 2 * K))) & (pair * 0x0001000100010001ull);
    return (v | (v << (8 - K))) & byte_mask(K);
  }
}

}  // namespace fc
