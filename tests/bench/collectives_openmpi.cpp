// The OpenMPI part of bench_collectives, which runs it under mpirun with two ranks. Prints the median seconds of each
// test case, one per line; the time of a call is that of its slower rank.
#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "bench/collectives.hpp"

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  auto* tensor = static_cast<float*>(std::aligned_alloc(4096, 64 << 20));
  auto* part = static_cast<float*>(std::aligned_alloc(4096, 32 << 20));
  std::memset(part, 0, 32 << 20);
  for (const auto& test_case : zr::bench::kCases) {
    const auto n = static_cast<int>(test_case.elements());
    const std::string op = test_case.op;
    const auto call = [&] {
      if (op == "all_reduce") MPI_Allreduce(MPI_IN_PLACE, tensor, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      if (op == "reduce_scatter") MPI_Reduce_scatter_block(tensor, part, n / 2, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      if (op == "all_gather")
        MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, tensor, n / 2, MPI_FLOAT, MPI_COMM_WORLD);
    };
    std::vector<double> mine = zr::bench::time_calls(
                            test_case, tensor, [] { MPI_Barrier(MPI_COMM_WORLD); }, call),
                        slower(mine.size());
    MPI_Reduce(mine.data(), slower.data(), static_cast<int>(mine.size()), MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    std::sort(slower.begin(), slower.end());
    if (rank == 0) std::printf("%.9g\n", slower[slower.size() / 2]);
  }
  MPI_Finalize();
  return 0;
}
