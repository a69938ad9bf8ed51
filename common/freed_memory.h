// What the allocator does with memory that is freed.
#pragma once

namespace lrmoe {

// Arrays of up to 32 MiB are made of memory that was freed before, of which the process keeps up to 256 MiB.
// A plan for a thousand ranks needs arrays of MiBs each time, and pages fresh from the kernel cost it up to a
// third of its time. Once, before there are threads.
void KeepFreedMemory();

}  // namespace lrmoe
