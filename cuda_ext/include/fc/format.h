// A wire format and the layout of its messages as plain integers (WIRE.md, "Wire layout").
//
// The integers arrive from Python by field name (bindings/format_fields.h); `fc_eval/wire/layout.py` computes the same
// sizes from the same definitions, and a test holds the two equal.
#pragma once

#include "fc/bits.h"

namespace fc {

enum Kind : int32_t { kInt = 0, kFloat = 1, kMx = 2 };
enum Scheme : int32_t { kNoScheme = 0, kAsym = 1, kSym = 2, kSignedExtreme = 3 };

struct Format {
  int32_t kind;        // Kind
  int32_t bits;        // per code, 2 to 8
  int32_t group;       // elements, 8 to 4096; 0: one group per row
  int32_t scheme;      // Scheme, of integer codes
  int32_t exponent;    // minifloat elements: exponent bits, 0 for integers
  int32_t mantissa;    //                     mantissa bits
  int32_t bias;        //                     exponent bias
  int32_t max_code;    //                     code of the largest finite value
  int32_t emax;        // exponent of the largest power of two of an mx element
  int32_t scale_bits;  // width of an mx scale, 4 to 8, otherwise 0
  int32_t spikes;      // 1: the smallest and the largest element travel unquantized
};

constexpr int64_t kSectionAlign = 16, kBlockElements = 1024, kTokenAlign = 128;

struct Layout {
  int64_t tokens, hidden;
  int64_t group;             // elements of a padded group
  int64_t groups_per_row;    // the last may be short
  int64_t groups_per_block;  // whole groups
  int64_t blocks;
  int64_t block_elements, block_bytes;
  int64_t plane[4];      // offset of the code plane of 8, 4, 2, 1 bits; -1 where there is none
  int64_t scale[4];      // the same for packed mx scales
  int64_t meta[2];       // first and second metadata; -1 where there is none
  int64_t spike_values;  // -1 where there is none
  int64_t spike_positions;
  int32_t value_bytes;     // of one value, one metadata float, one spike value
  int32_t position_bytes;  // of one spike position

  FC_FN int64_t groups() const { return tokens * groups_per_row; }
  FC_FN int64_t total_bytes() const { return blocks * block_bytes; }
  FC_FN bool permuted() const { return block_elements == kBlockElements; }
};

FC_FN int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

FC_FN Layout make_layout(const Format& f, int64_t tokens, int64_t hidden, int32_t value_bytes) {
  Layout l{};
  l.tokens = tokens;
  l.hidden = hidden;
  l.group = f.group ? f.group : ceil_div(hidden, kTokenAlign) * kTokenAlign;
  l.groups_per_row = f.group ? ceil_div(hidden, f.group) : 1;
  l.groups_per_block = f.group && f.group < kBlockElements ? kBlockElements / f.group : 1;
  l.blocks = ceil_div(tokens * l.groups_per_row, l.groups_per_block);
  l.block_elements = l.group * l.groups_per_block;
  l.value_bytes = value_bytes;
  l.position_bytes = l.group <= 256 ? 1 : 2;

  int64_t offset = 0;
  const auto section = [&offset](bool present, int64_t payload) {
    if (!present) return int64_t{-1};
    const int64_t at = offset;
    offset += ceil_div(payload, kSectionAlign) * kSectionAlign;
    return at;
  };
  const int64_t groups = l.groups_per_block;
  for (int i = 0; i < 4; ++i)
    l.plane[i] = section(f.bits & plane_width(i), ceil_div(l.block_elements * plane_width(i), 8));
  for (int i = 0; i < 4; ++i) l.scale[i] = section(f.scale_bits & plane_width(i), ceil_div(groups * plane_width(i), 8));
  l.meta[0] = section(f.kind != kMx, groups * value_bytes);
  l.meta[1] = section(f.scheme == kAsym, groups * value_bytes);
  l.spike_values = section(f.spikes, 2 * groups * value_bytes);
  l.spike_positions = section(f.spikes, 2 * groups * l.position_bytes);
  l.block_bytes = offset;
  return l;
}

// The place of element e of a block in its code planes. In a block of 1024, e = 256 i + 8 L + j (load i, lane L, j of
// 8) stands at 32 L + 8 i + j, so that a lane of 32 reads its values and writes its codes 16 bytes at a time.
FC_FN int64_t place_of(int64_t e) { return (e & 7) | (((e >> 8) & 3) << 3) | (((e >> 3) & 31) << 5); }
FC_FN int64_t element_at(int64_t place) { return (place & 7) | (((place >> 3) & 3) << 8) | (place >> 5) << 3; }

}  // namespace fc
