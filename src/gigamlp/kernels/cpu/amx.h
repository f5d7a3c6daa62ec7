// AMX: 16 rows x 64 bytes times 64 x 16 codes in one instruction. It takes the place of the dense form; zeros, floats
// and all that follows the sums are those of AVX-512. Rows come gathered: 32 to a block, padded to 64 bytes.
#pragma once
#include "tiles.h"

namespace {

constexpr int64_t kTileBytes = 64, kTileRows = 16, kTile = kTileRows * kTileBytes;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {0};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0};
};

// The tiles of a thread: on for as long as this lives.
struct Tiles {
  Tiles() {
    const TileConfig config;
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
};

// sums [16][16] of a tile, finished and written for `count` rows
FI void put_tile(const int32_t* sums, int64_t first, int64_t count, const Finish& f) {
  for (int64_t r = 0; r < count; r++) {
    const V::I a[1] = {V::load(sums + r * 16)};
    put_sums<1, 1>(a, f, first + r);
  }
}

// 32 rows (those from `count` on are garbage and not written) times one or two vectors of 16 outputs
template <bool kPair>
__attribute__((noinline)) void amx_tile(const uint8_t* x, int64_t stride, int64_t count, int64_t steps,
                                        const uint8_t* w, const Finish& given) {
  const Finish f = given;
  const bool low = count > kTileRows;
  const uint8_t* second = w + steps * kTile;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < steps; k++) {
    _tile_loadd(4, x + k * kTileBytes, stride);
    _tile_loadd(6, w + k * kTile, kTileBytes);
    _tile_dpbusd(0, 4, 6);
    if (kPair) {
      _tile_loadd(7, second + k * kTile, kTileBytes);
      _tile_dpbusd(1, 4, 7);
    }
    if (low) {
      _tile_loadd(5, x + kTileRows * stride + k * kTileBytes, stride);
      _tile_dpbusd(2, 5, 6);
      if (kPair) _tile_dpbusd(3, 5, 7);
    }
  }
  alignas(64) int32_t sums[4][16 * 16];
  _tile_stored(0, sums[0], kTileBytes);
  _tile_stored(1, sums[1], kTileBytes);
  _tile_stored(2, sums[2], kTileBytes);
  _tile_stored(3, sums[3], kTileBytes);
  const int64_t above = low ? kTileRows : count;
  put_tile(sums[0], 0, above, f);
  if (kPair) put_tile(sums[1], 0, above, Finish::at(f, 16));
  if (low) {
    put_tile(sums[2], kTileRows, count - kTileRows, f);
    if (kPair) put_tile(sums[3], kTileRows, count - kTileRows, Finish::at(f, 16));
  }
}

void amx_layer(const Layer& l, const uint8_t* blob, const uint8_t* x, int64_t stride, int64_t rows, const Finish& f) {
  const int64_t steps = (l.in + kTileBytes - 1) / kTileBytes, units = l.pad / 16;
  for (int64_t unit = 0; unit < units; unit += 2) {
    const uint8_t* w = blob + l.weights + unit * steps * kTile;
    const bool pair = unit + 1 < units;
    const Finish here = Finish::at(f, unit * 16);
    if (rows == 1) {  // a tile would be empty but for a sixteenth
      dense_row<1, 1>(x, steps * kTileBytes, w, here);
      if (pair) dense_row<1, 1>(x, steps * kTileBytes, w + steps * kTile, Finish::at(here, 16));
      continue;
    }
    for (int64_t r = 0; r < rows; r += 2 * kTileRows) {
      Finish mine = here;
      if (f.bytes) mine.bytes += r * f.stride;
      else mine.floats += r * f.stride;
      const int64_t count = rows - r < 2 * kTileRows ? rows - r : 2 * kTileRows;
      if (pair) amx_tile<true>(x + r * stride, stride, count, steps, w, mine);
      else amx_tile<false>(x + r * stride, stride, count, steps, w, mine);
    }
  }
}

}  // namespace
