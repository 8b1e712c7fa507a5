// Which of the faults in a copy of the kernels is on (planting.py); 0: none.
#pragma once

namespace flash_cute {
inline int planted = 0;
}
