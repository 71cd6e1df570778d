// Print the fastest instruction set that this CPU can run, of those that the compiler knows. CMakeLists.txt runs it.
#include <stdio.h>

#include "dispatch.cpp"

const Kernels multihead_scalar = {};  // is listed, and not run

int main() { fputs(multihead_instruction_set(multihead_fastest_of_cpu()), stdout); }
