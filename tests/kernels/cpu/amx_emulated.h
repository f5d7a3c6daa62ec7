// AMX's tile instructions in plain C++, for machines without them: what GIGAMLP_EMULATE_AMX builds the kernels with.
#pragma once
#include <stdint.h>
#include <string.h>

namespace {

struct EmulatedTile {
  alignas(64) uint8_t at[16][64];
};

thread_local EmulatedTile emulated[8];

inline void emulated_load(int t, const void* from, int64_t stride) {
  for (int r = 0; r < 16; r++) memcpy(emulated[t].at[r], (const uint8_t*)from + r * stride, 64);
}

inline void emulated_store(int t, void* to, int64_t stride) {
  for (int r = 0; r < 16; r++) memcpy((uint8_t*)to + r * stride, emulated[t].at[r], 64);
}

inline void emulated_zero(int t) { memset(&emulated[t], 0, sizeof emulated[t]); }

inline void emulated_dot(int c, int a, int b) {
  for (int m = 0; m < 16; m++) {
    for (int n = 0; n < 16; n++) {
      uint32_t sum;
      memcpy(&sum, emulated[c].at[m] + 4 * n, 4);
      for (int k = 0; k < 16; k++)
        for (int i = 0; i < 4; i++)
          sum += (uint32_t)((int)emulated[a].at[m][4 * k + i] * (int)(int8_t)emulated[b].at[k][4 * n + i]);
      memcpy(emulated[c].at[m] + 4 * n, &sum, 4);
    }
  }
}

}  // namespace

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbusd
#undef _tile_loadconfig
#undef _tile_release
#define _tile_loadd emulated_load
#define _tile_stored emulated_store
#define _tile_zero emulated_zero
#define _tile_dpbusd emulated_dot
#define _tile_loadconfig(config) (void)(config)
#define _tile_release() (void)0
