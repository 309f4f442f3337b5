// What a checkpoint says about how its tokens should be chosen.
#ifndef MX_ENGINE_SUGGEST_H
#define MX_ENGINE_SUGGEST_H

#include "format/weights.h"
#include "mlxcel.h"

// Reads generation_config.json of a folder, or the keys general.sampling.* of a GGUF file. Fields
// that are there and sound are written to s; their MLXCEL_SAMPLING_* bits are returned. text gets
// them as words ("temperature 0.6, top_p 0.9 (generation_config.json)"), nothing when there are
// none. A value of another type or out of range, and a setting that is not supported, is reported
// as a warning and not used.
uint32_t engine_read_suggestions(const mx_weights *w, mlxcel_sampling *s, mx_buf *text);

// Copies the fields of bits.
void engine_copy_suggestions(mlxcel_sampling *to, const mlxcel_sampling *from, uint32_t bits);

#endif
