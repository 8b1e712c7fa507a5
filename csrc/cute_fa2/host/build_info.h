// JSON for Python: what was built, and which plan a call would get.
#pragma once

#include <cstdint>
#include <string>

namespace flash_cute {

std::string build_info();

// The sm80 tile entries, of the forward and of the backward, that a device gets which lends a CTA
// so many bytes of shared memory.
std::string tiles_for(int64_t smem_per_cta);

// The plan of a call on a device that need not be there. `request` is "batch=1,heads_q=32,...",
// with the names of Request in plan_request.cpp. `tuning` is the op's.
std::string plan(const std::string& request, const std::string& tuning);

}  // namespace flash_cute
