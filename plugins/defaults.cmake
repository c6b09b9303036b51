# The plug-ins that a file which names none gets. core/ knows no plug-in by name: this is where the names come from.
set(ZR_DEFAULT_STRATEGY zero0)
set(ZR_DEFAULT_OPTIMIZER adamw)
set(ZR_DEFAULT_COMMUNICATOR shm)
# What `auto` fills behind the device, in this order.
set(ZR_DEFAULT_TIERS "cpu nvme")
