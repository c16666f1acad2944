// send and recv that a stop of the process does not interrupt. Private to the wire.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>

#include <cerrno>
#include <cstddef>

namespace embertide {

// A process that was stopped and goes on finds calls with a timeout interrupted (EINTR).
template <typename Call>
ssize_t Uninterrupted(const Call& call) {
  ssize_t done = -1;
  do {
    done = call();
  } while (done < 0 && errno == EINTR);
  return done;
}

// As send, which then raises no SIGPIPE.
inline ssize_t SendSome(int socket, const char* bytes, size_t size) {
  return Uninterrupted([=] { return ::send(socket, bytes, size, MSG_NOSIGNAL); });
}

inline ssize_t ReceiveSome(int socket, char* bytes, size_t size) {
  return Uninterrupted([=] { return ::recv(socket, bytes, size, 0); });
}

}  // namespace embertide
