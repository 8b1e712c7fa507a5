// The plan of a forward: everything that the host decides about a call, decided once, as plain
// data. `launch_fwd` carries it out; `describe` (describe.h) prints it; tests compare it.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "host/device.h"
#include "host/gqa_layout.h"
#include "host/params.h"
#include "host/tile_schedule.h"

namespace flash_cute {

// What tests and benchmarks may decide in place of the plan; 0 leaves it to the plan.
struct FwdOverrides {
  int64_t arch = 0;        // 80 or 90
  int64_t smem_limit = 0;  // the sm80 tile is one that fits so many bytes of shared memory
  int64_t splits = 0;      // split-KV: at most so many
};

// From "arch=90,splits=4", any of the names above. Throws std::runtime_error.
FwdOverrides parse_overrides(const std::string& text);

// How TMA knows the tensors of a call (sm90/tensor_map.h).
struct TensorMaps {
  CUtensorMap q;    // boxes of (queries of a consumer, heads of a group, a strip of the head dim)
  CUtensorMap k;    // boxes of (block_n, a strip)
  CUtensorMap v;    // as k
  CUtensorMap out;  // boxes of (queries of a warp, heads of a group, a strip); not used by splits
};

struct FwdPlan {
  Arch arch;
  std::string why_not_sm90;  // if the arch is sm80 though sm90 was not ruled out by the caller
  int head_dim;              // that the kernel was built for
  int tile;                  // index of the entry in the arch's tile table
  int block_n;               // keys of a block
  GqaLayout gqa;
  SplitKV splits;  // without addresses
  TileSchedule schedule;
  int blocks;  // packed sequences: at most so many tiles of a head, of all sequences together
  int64_t workspace_bytes;  // of device memory, that `launch_fwd` wants
  TensorMaps tensor_maps;   // sm90
};

// Encodes the maps of a plan that is complete but for them. Returns why the driver refused one, or
// nothing. Without a driver plans are made without it.
using EncodeTensorMaps = std::string (*)(const FwdParams&, const FwdPlan&, TensorMaps&);

// The addresses in `params` matter for tensor maps alone. Throws std::runtime_error if this build
// cannot serve the call.
FwdPlan plan_fwd(const FwdParams& params, const FwdOverrides& overrides,
                 const DeviceProperties& device, EncodeTensorMaps encode_tensor_maps);

// The addresses of a plan's workspace in `params`: of splits, or of the list of tiles.
void place_workspace(const FwdPlan& plan, FwdParams& params, void* memory);

}  // namespace flash_cute
