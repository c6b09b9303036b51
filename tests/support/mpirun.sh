#!/bin/sh
# Runs mpirun of OpenMPI with these arguments, also as root. OpenMPI 4.1 sometimes does not end after ranks that have
# not ended MPI (a deadlock in PMIx_server_finalize): it is killed when all its processes have ended for 10 s.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
mpirun.openmpi "$@" &
job=$!
(
  idle=0
  while [ $idle -lt 10 ]; do
    sleep 1
    kill -0 $job || exit
    idle=$((idle + 1))
    for child in $(cat /proc/$job/task/*/children); do
      grep -q '^State:[[:space:]]*[^ZX[:space:]]' /proc/"$child"/status && idle=0
    done
  done
  kill -9 $job
) > /dev/null 2>&1 &
wait $job
