/* The communicator "@ID@": Unix-domain sockets between all ranks of one machine. It has one operation, an all-gather of
 * bytes. The host composes every other collective of it and reduces in rank order, so results are bit-identical. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "zr/abi/communicator.h"
#include "zr/c.h"

enum { connect_milliseconds = 60000 };

typedef struct plugin {
  const zr_host* host;
} plugin;

typedef struct transfer { /* of one rank, in the collective that is under way */
  const char* out;
  char* in;
  size_t out_bytes, in_bytes; /* left to send and to receive */
} transfer;

typedef struct mesh { /* an open communicator */
  const zr_host* host;
  int32_t rank, world;
  int aborted;            /* an eventfd */
  int* sockets;           /* by rank; -1 for this one */
  struct pollfd* waiting; /* by rank, and `aborted` last */
  transfer* left;         /* by rank */
} mesh;

static zr_code create(const zr_host* host, const zr_config* config, void** self, zr_error* error) {
  plugin* me = calloc(1, sizeof *me);
  (void)config;
  if (!me) return zr_fail(error, ZR_NOMEM, 0, "no memory for the communicator");
  me->host = host;
  *self = me;
  return ZR_OK;
}
static void destroy(void* self) { free(self); }

static zr_code caps(void* self, zr_comm_caps* out, zr_error* error) {
  (void)self, (void)error;
  zr_comm_caps caps = {.ops = 1u << ZR_ALL_GATHER, .device_types = 1u << ZR_DEVICE_CPU};
  for (int dtype = ZR_F32; dtype <= ZR_I64; ++dtype) caps.dtypes |= 1u << dtype;
  ZR_WRITE_OUTPUT(out, caps);
  return ZR_OK;
}

static void close_mesh(void* comm) {
  mesh* me = comm;
  if (!me) return;
  for (int32_t r = 0; me->sockets && r < me->world; ++r)
    if (me->sockets[r] >= 0) close(me->sockets[r]);
  if (me->aborted >= 0) close(me->aborted);
  free(me->sockets);
  free(me->waiting);
  free(me->left);
  free(me);
}

/* A socket in the abstract namespace is open to every user of the machine. */
static int is_own(int socket) {
  struct ucred user;
  socklen_t bytes = sizeof user;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &user, &bytes) == 0 && user.uid == geteuid();
}

static zr_code connect_to(mesh* me, const zr_store_service* store, const char* prefix, int32_t peer, zr_error* error) {
  char key[512];
  struct sockaddr_un address;
  uint64_t bytes = sizeof address;
  snprintf(key, sizeof key, "%ssocket.%d", prefix, peer);
  const zr_code code = store->get(me->host, key, -1, &address, &bytes, error);
  if (code != ZR_OK) return code;
  const int fd = me->sockets[peer] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0 || connect(fd, (struct sockaddr*)&address, (socklen_t)bytes) != 0 || !is_own(fd) ||
      send(fd, &me->rank, sizeof me->rank, MSG_NOSIGNAL) != sizeof me->rank)
    return zr_fail(error, ZR_COMM, errno, "cannot connect to rank %d: %s", peer, strerror(errno));
  return ZR_OK;
}

static zr_code accept_one(mesh* me, int listener, zr_error* error) {
  int fd = -1;
  do { /* other users are turned away */
    struct pollfd waiting = {listener, POLLIN, 0};
    if (fd >= 0) close(fd);
    if (poll(&waiting, 1, connect_milliseconds) == 0)
      return zr_fail(error, ZR_TIMEOUT, 0, "a rank did not connect in 60 seconds");
    fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
  } while (fd >= 0 && !is_own(fd));
  int32_t peer = -1;
  if (fd >= 0 && recv(fd, &peer, sizeof peer, MSG_WAITALL) == sizeof peer && peer > me->rank && peer < me->world &&
      me->sockets[peer] < 0) {
    me->sockets[peer] = fd;
    return ZR_OK;
  }
  if (fd >= 0) close(fd);
  return zr_fail(error, ZR_COMM, errno, "cannot accept a rank: %s", strerror(errno));
}

/* Every rank listens, connects to all lower ranks and accepts all higher ones. */
static zr_code connect_all(mesh* me, const char* prefix, zr_error* error) {
  const zr_store_service* store = me->host->service(me->host, "zr.host.store/1");
  if (!store) return zr_fail(error, ZR_UNSUPPORTED, 0, "the host does not offer zr.host.store/1");
  char key[512];
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  socklen_t length = sizeof address;
  zr_code code = ZR_OK;
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  /* The kernel chooses a free address. */
  if (listener < 0 || bind(listener, (struct sockaddr*)&address, sizeof address.sun_family) != 0 ||
      listen(listener, me->world) != 0 || getsockname(listener, (struct sockaddr*)&address, &length) != 0)
    code = zr_fail(error, ZR_IO, errno, "cannot listen at a socket: %s", strerror(errno));
  snprintf(key, sizeof key, "%ssocket.%d", prefix, me->rank);
  if (code == ZR_OK) code = store->put(me->host, key, &address, length, error);
  for (int32_t peer = 0; code == ZR_OK && peer < me->rank; ++peer) code = connect_to(me, store, prefix, peer, error);
  for (int32_t n = me->rank + 1; code == ZR_OK && n < me->world; ++n) code = accept_one(me, listener, error);
  if (listener >= 0) close(listener);
  return code;
}

static zr_code open_mesh(void* self, const zr_comm_open* how, void** comm, zr_error* error) {
  const size_t world = (size_t)how->world;
  mesh* me = calloc(1, sizeof *me);
  if (!me) return zr_fail(error, ZR_NOMEM, 0, "no memory for the communicator");
  me->host = ((plugin*)self)->host;
  me->rank = how->rank;
  me->world = how->world;
  me->aborted = eventfd(0, EFD_CLOEXEC);
  me->sockets = malloc(world * sizeof *me->sockets);
  me->waiting = calloc(world + 1, sizeof *me->waiting);
  me->left = calloc(world, sizeof *me->left);
  for (size_t r = 0; me->sockets && r < world; ++r) me->sockets[r] = -1;
  const zr_code code = me->sockets && me->waiting && me->left && me->aborted >= 0
                           ? connect_all(me, how->store_prefix, error)
                           : zr_fail(error, ZR_NOMEM, errno, "no memory for %zu ranks", world);
  if (code == ZR_OK)
    *comm = me;
  else
    close_mesh(me);
  return code;
}

/* Wakes submit(), now and in every later call: nobody reads the counter. */
static void abort_mesh(void* comm) {
  const uint64_t one = 1;
  if (write(((mesh*)comm)->aborted, &one, sizeof one) != sizeof one) return; /* it is full: aborted before */
}

static zr_code move(int32_t peer, int fd, transfer* left, zr_error* error) {
  ssize_t n = left->out_bytes ? send(fd, left->out, left->out_bytes, MSG_DONTWAIT | MSG_NOSIGNAL) : 0;
  if (n < 0 && errno != EAGAIN && errno != EINTR)
    return zr_fail(error, ZR_COMM, errno, "cannot send to rank %d: %s", peer, strerror(errno));
  if (n > 0) left->out += n, left->out_bytes -= (size_t)n;
  if (left->in_bytes == 0) return ZR_OK;
  n = recv(fd, left->in, left->in_bytes, MSG_DONTWAIT);
  if (n == 0) return zr_fail(error, ZR_COMM, 0, "rank %d closed its socket", peer);
  if (n < 0 && errno != EAGAIN && errno != EINTR)
    return zr_fail(error, ZR_COMM, errno, "cannot receive from rank %d: %s", peer, strerror(errno));
  if (n > 0) left->in += n, left->in_bytes -= (size_t)n;
  return ZR_OK;
}

/* Waits until a socket is ready and moves what it takes, until nothing is left. */
static zr_code exchange(mesh* me, zr_error* error) {
  for (;;) {
    int busy = 0;
    for (int32_t r = 0; r < me->world; ++r) {
      const int events = (me->left[r].out_bytes ? POLLOUT : 0) | (me->left[r].in_bytes ? POLLIN : 0);
      me->waiting[r] = (struct pollfd){events ? me->sockets[r] : -1, (short)events, 0};
      busy |= events;
    }
    if (!busy) return ZR_OK;
    me->waiting[me->world] = (struct pollfd){me->aborted, POLLIN, 0};
    if (poll(me->waiting, (nfds_t)me->world + 1, -1) < 0) {
      if (errno != EINTR) return zr_fail(error, ZR_COMM, errno, "poll: %s", strerror(errno));
      continue;
    }
    if (me->waiting[me->world].revents) return zr_fail(error, ZR_CANCELLED, 0, "the communicator was aborted");
    for (int32_t r = 0; r < me->world; ++r) {
      const zr_code code = me->waiting[r].revents ? move(r, me->sockets[r], &me->left[r], error) : ZR_OK;
      if (code != ZR_OK) return code;
    }
  }
}

static zr_code submit(void* comm, const zr_coll* coll, zr_stream* stream, zr_done* done, zr_error* error) {
  mesh* me = comm;
  const size_t size = (size_t)zr_bytes_of(coll->src.dtype);
  if (coll->op != ZR_ALL_GATHER || size == 0 || stream)
    return zr_fail(error, ZR_UNSUPPORTED, 0, "only all_gather of known dtypes, without a stream, is supported");
  const size_t own_bytes = (size_t)coll->src.count * size;
  char* to = coll->dst.data;
  for (int32_t r = 0; r < me->world; ++r) {
    const size_t bytes = coll->counts ? (size_t)coll->counts[r] * size : own_bytes;
    me->left[r] = r == me->rank ? (transfer){0} : (transfer){coll->src.data, to, own_bytes, bytes};
    if (r == me->rank && bytes > 0 && to != (char*)coll->src.data) memcpy(to, coll->src.data, bytes);
    if (bytes > 0) to += bytes;
  }
  const zr_code code = exchange(me, error);
  return code == ZR_OK ? zr_complete(me->host, done) : code;
}

static const zr_communicator_api api = {
    .size = sizeof api, .caps = caps, .open = open_mesh, .close = close_mesh, .submit = submit, .abort = abort_mesh};
static const zr_component component = {.size = sizeof component,
                                       .id = "@ID@",
                                       .kind = "zr.communicator/1",
                                       .version = "0.1.0",
                                       .api = &api,
                                       .create = create,
                                       .destroy = destroy,
                                       .description = "Unix-domain sockets between the ranks of one machine"};
ZR_MODULE_C(communicator, "@ID@", "@VENDOR@", "0.1.0", component);
