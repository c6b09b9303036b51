# The default plug-ins, for job files that do not name one. core/ does not contain names of plug-ins; it gets them here.
set(ZR_DEFAULT_STRATEGY zero0)
set(ZR_DEFAULT_OPTIMIZER adamw)
# What communicator = "auto", the default, means if all ranks are on one host, and otherwise.
set(ZR_HOST_COMMUNICATOR shm)
set(ZR_HOSTS_COMMUNICATOR mpi)
# The tiers that `auto` fills after the device, in this order.
set(ZR_DEFAULT_TIERS "cpu nvme")
