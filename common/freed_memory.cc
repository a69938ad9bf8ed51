#include "common/freed_memory.h"

#include <malloc.h>

namespace lrmoe {

void KeepFreedMemory() {
  // Either is only about speed: that glibc does not take a value changes nothing else.
  (void)mallopt(M_MMAP_THRESHOLD, 32 << 20);
  (void)mallopt(M_TRIM_THRESHOLD, 256 << 20);
}

}  // namespace lrmoe
