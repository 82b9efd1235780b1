#pragma once

#include <cstdint>
#include <string>

// The rules of converting whole models, for both languages.
namespace attnpack::convert {

// A calibration holds the input of one layer, so a whole model takes none.
void refuse_calibration(bool given);

// A norm over all heads gives each head a scale that depends on the others. Merged heads would change it.
void refuse_shared_norm(bool all_heads);

// name is the argument of the caller, kind the class of the module, count the number of layers that can be converted.
void check_layers_found(const std::string& name, const std::string& kind, uint64_t count);

}  // namespace attnpack::convert
