// An authority for tests: signs certificates and lays them out as cert-manager does.
#pragma once

#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include "embertide/status.h"

namespace embertide {

class TestAuthority {
 public:
  TestAuthority() : key_(EVP_EC_gen("P-256")), certificate_(X509_new()) {
    Fill(certificate_.get(), key_.get(), "authority", "", "", 3600);
    Extend(certificate_.get(), NID_basic_constraints, "critical,CA:TRUE");
    EMBERTIDE_CHECK(X509_sign(certificate_.get(), key_.get(), EVP_sha256()) > 0);
  }

  // Writes tls.crt, tls.key and ca.crt for localhost and 127.0.0.1, and for an identity's URI if it
  // is not empty; valid for so long from now on, or for no time if that is negative. A file is
  // replaced at once, the key first.
  void Issue(const std::string& folder, const std::string& uri, long seconds = 3600) const {
    std::filesystem::create_directories(folder);
    const Key key(EVP_EC_gen("P-256"));
    const Certificate certificate(X509_new());
    Fill(certificate.get(), key.get(), "end", "DNS:localhost,IP:127.0.0.1", uri, seconds);
    EMBERTIDE_CHECK(X509_sign(certificate.get(), key_.get(), EVP_sha256()) > 0);
    Write(folder + "/tls.key", [&](FILE* file) {
      return PEM_write_PrivateKey(file, key.get(), nullptr, nullptr, 0, nullptr, nullptr);
    });
    Write(folder + "/tls.crt", [&](FILE* file) { return PEM_write_X509(file, certificate.get()); });
    Write(folder + "/ca.crt", [&](FILE* file) { return PEM_write_X509(file, certificate_.get()); });
  }

 private:
  struct Free {
    void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
    void operator()(X509* certificate) const { X509_free(certificate); }
  };
  using Key = std::unique_ptr<EVP_PKEY, Free>;
  using Certificate = std::unique_ptr<X509, Free>;

  static void Extend(X509* certificate, int kind, const std::string& text) {
    X509V3_CTX context;
    X509V3_set_ctx_nodb(&context);
    X509V3_set_ctx(&context, certificate, certificate, nullptr, nullptr, 0);
    X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, kind, text.c_str());
    EMBERTIDE_CHECK(extension != nullptr && X509_add_ext(certificate, extension, -1) == 1);
    X509_EXTENSION_free(extension);
  }

  void Fill(X509* certificate, EVP_PKEY* key, const std::string& name, const std::string& hosts,
            const std::string& uri, long seconds) const {
    static long serial = 0;
    X509_set_version(certificate, 2);
    ASN1_INTEGER_set(X509_get_serialNumber(certificate), ++serial);
    X509_gmtime_adj(X509_getm_notBefore(certificate), -3600);
    X509_gmtime_adj(X509_getm_notAfter(certificate), seconds);
    X509_NAME* subject = X509_get_subject_name(certificate);
    X509_NAME_add_entry_by_txt(subject, "CN", MBSTRING_ASC,
                               reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
    X509_set_issuer_name(certificate, X509_get_subject_name(certificate_.get()));
    X509_set_pubkey(certificate, key);
    if (hosts.empty()) return;
    Extend(certificate, NID_subject_alt_name, hosts + (uri.empty() ? "" : ",URI:" + uri));
  }

  template <typename Print>
  static void Write(const std::string& path, const Print& print) {
    FILE* file = std::fopen((path + ".new").c_str(), "w");
    EMBERTIDE_CHECK(file != nullptr && print(file) == 1 && std::fclose(file) == 0);
    std::filesystem::rename(path + ".new", path);
  }

  Key key_;
  Certificate certificate_;
};

}  // namespace embertide
