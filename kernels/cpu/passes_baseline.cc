// The passes for any x86-64.
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/cpu/passes.h"

#define LRMOE_PASSES kBaselinePasses
#define LRMOE_PASSES_NAME "x86-64"
#include "kernels/cpu/passes_body.h"
