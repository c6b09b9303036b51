# The example's optimizer and the strategy that `zeroth new` writes, built with the installed SDK alone and found
# through ZR_PLUGIN_PATH, train with every strategy and on every tier, and resume with another number of ranks, to the
# same bits. For package.cmake.
must(${prefix}/bin/zeroth new strategy acme.even ${SCRATCH}/even_source)
set(lion_source ${SOURCE}/examples/plugins/lion)
set(even_source ${SCRATCH}/even_source)
foreach(plugin lion even)
  set(${plugin} ${SCRATCH}/${plugin})
  must(${cmake} -DCMAKE_PREFIX_PATH=${SCRATCH}/sdk -S ${${plugin}_source} -B ${${plugin}})
  must(${CMAKE_COMMAND} --build ${${plugin}})
  file(GLOB library ${${plugin}}/plugins/*.so)
  must(${conform} ${library})
endforeach()

# Trains quickstart with the keys, and sets `hash` to the weights hash in its summary.
function(lion_hash hash name)
  must(${CMAKE_COMMAND} -E env ZR_PLUGIN_PATH=${lion}/plugins:${even}/plugins ${prefix}/bin/zeroth train ${ARGN}
       job.program="${SCRATCH}/quickstart/quickstart" optimizer.use=lion optimizer.lr=1e-3 train.micro_batch=16
       train.global_batch=64 job.name=${name} job.runs="${SCRATCH}/lion_runs")
  file(READ ${SCRATCH}/lion_runs/${name}/summary.json summary)
  string(JSON value GET "${summary}" weights_hash)
  set(${hash} ${value} PARENT_SCOPE)
endfunction()
function(same_hash name expected)
  lion_hash(found ${name} ${ARGN})
  if(NOT found STREQUAL expected)
    message(FATAL_ERROR "lion, ${name}: the weights hash is ${found}, not ${expected}")
  endif()
endfunction()
set(toml ${SOURCE}/examples/quickstart/quickstart.toml)
set(nvme "offload.nvme={path=\"${SCRATCH}\"}" offload.optimizer=nvme)
lion_hash(expected zero0 ${toml} strategy=zero0 train.steps=20)
same_hash(zero1 ${expected} ${toml} strategy=zero1 train.steps=20 ${nvme})
same_hash(zero2 ${expected} ${toml} strategy=zero2 train.steps=20 offload.optimizer=cpu)
same_hash(zero3 ${expected} ${toml} strategy=zero3 train.steps=20 job.ranks=1)
same_hash(even ${expected} ${toml} strategy=acme.even train.steps=20 job.ranks=4)
same_hash(even_cpu ${expected} ${toml} strategy=acme.even train.steps=20 job.ranks=2 offload.optimizer=cpu)
same_hash(even_one ${expected} ${toml} strategy=acme.even train.steps=20 job.ranks=1)
set(checkpoints checkpoint.every=10 "checkpoint.dir=\"${SCRATCH}/lion_checkpoints\"")
lion_hash(half half ${toml} strategy=zero3 train.steps=10 ${checkpoints})
same_hash(even_resumed ${expected} --resume ${toml} strategy=acme.even train.steps=20 job.ranks=2
          "checkpoint.dir=\"${SCRATCH}/lion_checkpoints\"")
same_hash(resumed ${expected} --resume ${toml} strategy=zero1 train.steps=20 job.ranks=4 ${checkpoints})
