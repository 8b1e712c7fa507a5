// What people and tests see of tiles and plans, as JSON.
#pragma once

#include <string>

#include "host/device.h"
#include "host/json.h"
#include "host/params.h"
#include "host/plan_bwd.h"
#include "host/plan_fwd.h"
#include "tiles/bwd_sm80.h"
#include "tiles/bwd_sm80_large.h"
#include "tiles/bwd_sm90.h"
#include "tiles/fwd_sm80.h"
#include "tiles/fwd_sm90.h"

namespace flash_cute {

JsonObject as_json(const TileEntrySm80& entry, DType dtype);
JsonObject as_json(const TileEntrySm90& entry, DType dtype);
JsonObject as_json(const BwdEntrySm80& entry, DType dtype);
JsonObject as_json(const LargeBwdEntrySm80& entry, DType dtype);
JsonObject as_json(const BwdConfigSm90& config, DType dtype);
JsonObject as_json(const DqConfigSm90& config, DType dtype);
JsonObject as_json(const WindowConfigSm90& config, DType dtype);

std::string describe(const FwdPlan& plan, const FwdParams& params, const DeviceProperties& device);
std::string describe(const BwdPlan& plan, const BwdParams& params, const DeviceProperties& device);

}  // namespace flash_cute
