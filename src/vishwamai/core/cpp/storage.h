// How the numbers of an array lie in memory.
#pragma once

namespace vishwamai {

enum class Storage : int { f32, bf16, f64, s8, s32, f16 };

}  // namespace vishwamai
