// What a stream's thread has to set up before it may call torch's CPU kernels: one thread each, no autograd.
#pragma once

namespace sim {
void prepare_worker();  // operators.cpp
}  // namespace sim
