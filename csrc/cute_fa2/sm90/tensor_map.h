// Tensor maps: how TMA knows a tensor. Host code, without CuTe.
#pragma once

#include <string>

#include "host/plan_bwd.h"
#include "host/plan_fwd.h"

namespace flash_cute::sm90 {

// Encodes the maps of a forward's plan on the current device (EncodeTensorMaps in plan_fwd.h).
std::string encode_fwd_maps(const FwdParams& params, const FwdPlan& plan, TensorMaps& maps);
// And of a backward's (EncodeBwdTensorMaps in plan_bwd.h).
std::string encode_bwd_maps(const BwdParams& params, const BwdPlan& plan, BwdTensorMaps& maps);

}  // namespace flash_cute::sm90
