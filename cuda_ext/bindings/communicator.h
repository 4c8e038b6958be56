// What `communicator.cpp` adds to the module of the CUDA codec.
#pragma once

#include <nanobind/nanobind.h>

namespace fc::bind {

void export_communicator(nanobind::module_& m);

}  // namespace fc::bind
