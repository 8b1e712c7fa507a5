// The plan of a backward, as plan_fwd.h has that of a forward.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "host/device.h"
#include "host/params.h"
#include "host/tile_schedule.h"

namespace flash_cute {

// What tests and benchmarks may decide in place of the plan; 0 leaves it to the plan.
struct BwdOverrides {
  int64_t arch = 0;         // 80 or 90
  int64_t smem_limit = 0;   // the tile is one that fits so many bytes of shared memory
  int64_t head_splits = 0;  // at most so many CTAs share the query heads of a group
};

// From "smem_limit=101376,...", any of the names above. What only a forward knows is passed over.
// Throws std::runtime_error.
BwdOverrides parse_bwd_overrides(const std::string& text);

// How TMA knows the tensors of a call (sm90/tensor_map.h).
struct BwdTensorMaps {
  static constexpr int kRows = 64;      // of a box, with a strip of the head dim
  static constexpr int kWarpRows = 16;  // of one of dk and dv
  CUtensorMap q;
  CUtensorMap dout;
  CUtensorMap k;
  CUtensorMap v;
  CUtensorMap dk;  // in one pass, unless CTAs share the heads of a group
  CUtensorMap dv;
  // MaskKind::kPacked: the same, but each ends where a sequence does (sm90/tensor_map.cpp).
  CUtensorMap ragged_q;
  CUtensorMap ragged_dout;
  CUtensorMap ragged_k;
  CUtensorMap ragged_v;
};

// Where dQ comes from. kTile: a tile of keys has all keys, and stores dQ. kSums: tiles of keys add
// their parts in memory. kOwnKernel: tiles of query rows (sm90; sm80/bwd/large/). kWindow: a tile
// of keys has those of its rows under a narrow window (sm90/bwd/window/).
enum class DqBy { kTile, kSums, kOwnKernel, kWindow };

// A window of which a block of 64 rows sees three blocks of 64 keys at most.
struct NarrowWindow {
  int before;   // blocks of keys that it sees ahead of the diagonal, and
  int behind;   // behind it
  int stretch;  // blocks of rows, and of keys, of a tile

  FLASH_CUTE_HOST_DEVICE int reach() const { return before + behind; }
};

struct BwdPlan {
  Arch arch;
  std::string why_not_sm90;  // if the arch is sm80 though sm90 was not ruled out by the caller
  int head_dim;              // that the kernel was built for, and
  int head_dim_v;            // of V
  int tile;                  // index of the entry in the arch's tile table
  int bias_splits;           // CTAs that share a tile of the gradient of a bias
  int columns;  // of a gradient that a tile has, if it is one of sm80/bwd/large/, which
                // have a table of their own; else 0
  int block_m;
  int block_n;
  DqBy dq_by;
  NarrowWindow window;  // of DqBy::kWindow
  int m_blocks;
  int n_blocks;
  int head_splits;
  TileOrder order;     // of tiles of block_n keys: it counts them as m_blocks
  int ctas;            // that take them
  TileOrder dq_order;  // of tiles of query rows, where dQ has a kernel of its own,
  int dq_block_m;      // of so many rows
  int dq_blocks;       // packed sequences: at most so many of those tiles in a head
  int64_t workspace_bytes;
  BwdTensorMaps tensor_maps;  // sm90
};

// As EncodeTensorMaps.
using EncodeBwdTensorMaps = std::string (*)(const BwdParams&, const BwdPlan&, BwdTensorMaps&);

// Throws std::runtime_error if this build cannot serve the call.
BwdPlan plan_bwd(const BwdParams& params, const BwdOverrides& overrides,
                 const DeviceProperties& device, EncodeBwdTensorMaps encode_tensor_maps);

// What the plan adds to `params`, with the workspace in memory of its workspace_bytes.
void place_workspace(const BwdPlan& plan, BwdParams& params, void* memory);

}  // namespace flash_cute
